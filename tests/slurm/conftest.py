"""One sandbox for all tests that need a real Slurm; see docs/sandbox.md."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from sandbox import instance, lifecycle  # noqa: E402
from sandbox.cluster import SUITES, Partition, Shape  # noqa: E402
from sandbox.driver import Driver  # noqa: E402
from sandbox.support import Progress  # noqa: E402

SHAPE = Shape(extra_partitions=(Partition("small", "n1"),))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            if item.get_closest_marker("timeout") is None:
                # The first sandbox of a machine takes minutes to build.
                item.add_marker(pytest.mark.timeout(900))


def remove_leftovers() -> None:
    """Take down sandboxes of test runs that were killed."""
    for name in instance.names():
        kind, _, pid = name.rpartition("-")
        if kind.startswith("test-") and pid.isdigit() and not Path("/proc", pid).exists():
            lifecycle.down(name, Progress())


def start(suite: str, shape: Shape = SHAPE, kind: str = "") -> Iterator[Driver]:
    remove_leftovers()
    name = f"test-{kind or suite}-{os.getpid()}"
    lifecycle.up(name, SUITES[suite], shape, Progress())
    try:
        yield Driver.of(name)
    finally:
        lifecycle.down(name, Progress())


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Driver]:
    """Start a sandbox with the current Slurm, 4 nodes × 2 GPUs, partitions `main` and `small` (n1 only)."""
    yield from start("forky")


@pytest.fixture(scope="session")
def old_sandbox() -> Iterator[Driver]:
    """Start a sandbox with Debian bookworm's Slurm 22.05, which no pyslurm supports."""
    yield from start("bookworm")


@pytest.fixture
def cluster(sandbox: Driver) -> Iterator[Driver]:
    """Give the sandbox with an empty queue, before and after."""
    sandbox.cancel_all()
    yield sandbox
    sandbox.cancel_all()
