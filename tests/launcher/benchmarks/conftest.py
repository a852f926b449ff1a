"""The benchmarks are scripts: they import each other from their own folder."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a benchmark by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module
