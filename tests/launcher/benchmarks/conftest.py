"""Benchmarks are imported by the tests that need one, as some import PyTorch."""

import importlib
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def benchmark() -> Callable[[str], ModuleType]:
    """Imports a benchmark by its name."""
    return lambda name: importlib.import_module(f"muri_lab.benchmarks.{name}")
