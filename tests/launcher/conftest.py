"""Fixtures of the launcher's tests."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_scripts import TRAIN, lines
from foreign_python import make_foreign_python
from launcher_harness import Launcher, ends, launcher_in

# Hundreds of processes start here: they compile their modules once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

SHARED_FIXTURES = ("two_ranks", "plain_results")
"""Fixtures of modules that are worth more than tests side by side."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that share an expensive fixture on one of xdist's workers."""
    for item in items:
        for name in set(SHARED_FIXTURES) & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(name))


@pytest.fixture(scope="session")
def foreign_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a user's own environment, made once."""
    return make_foreign_python(tmp_path_factory.mktemp("own") / "venv")


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """A launcher whose processes end with the test."""
    with launcher_in(tmp_path) as launcher:
        yield launcher


@pytest.fixture(scope="session")
def uninterrupted_curve(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The losses of `checkpoint_scripts.TRAIN`, run alone and without a stop."""
    with launcher_in(tmp_path_factory.mktemp("uninterrupted")) as launcher:
        path = launcher.folder / "uninterrupted.curve"
        place = {"MURI_CHECKPOINT_DIR": str(launcher.folder / "checkpoints")}
        assert ends(launcher.member(None, launcher.script(TRAIN), path, 0, **place)) == 0
        return lines(path)
