"""Every step of every simulation is checked, and commands mean a store of the test's own."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from profile_commands import use_own_store

from muri.simulator.engine.checks import SWITCH


@pytest.fixture(autouse=True)
def conservation_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in processes that a test starts."""
    monkeypatch.setenv(SWITCH, "1")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_own_store(tmp_path, monkeypatch)


@pytest.fixture
def benchmark() -> Callable[[str], ModuleType]:
    """Imports a benchmark by its name: only the tests that need one, as some import PyTorch."""
    return lambda name: importlib.import_module(f"muri_lab.benchmarks.{name}")
