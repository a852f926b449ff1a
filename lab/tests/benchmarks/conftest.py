"""Benchmarks are imported by the tests that need one, as some import PyTorch."""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from launcher_harness import Launcher, launcher_in


@pytest.fixture
def benchmark() -> Callable[[str], ModuleType]:
    """Imports a benchmark by its name."""
    return lambda name: importlib.import_module(f"muri_lab.benchmarks.{name}")


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """A launcher whose processes end with the test."""
    with launcher_in(tmp_path) as launcher:
        yield launcher
