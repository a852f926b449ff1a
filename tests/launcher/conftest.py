"""Fixtures of the launcher's tests."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_harness import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """A launcher whose processes end with the test. Socket paths must be short, hence the directory."""
    with tempfile.TemporaryDirectory(prefix="muri-", dir="/tmp") as run_dir:
        launcher = Launcher(tmp_path, Path(run_dir))
        yield launcher
        launcher.close()
