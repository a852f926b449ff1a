"""Fixtures of the launcher's tests."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from checkpoint_scripts import TRAIN, lines
from launcher_harness import Launcher, ends, launcher_in

# Hundreds of processes start here: they compile their modules once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

SHARED_FIXTURES = ("two_ranks", "plain_results")
"""Fixtures of modules that are worth more than tests side by side."""

_PARTS_OF_TORCH = (
    "torch", "torchgen", "functorch", "numpy", "numpy.libs", "sympy", "mpmath", "networkx", "jinja2", "markupsafe",
    "filelock", "fsspec", "typing_extensions.py",
)  # fmt: skip

_FOREIGN = ("muri", "click", "pydantic", "rich", "yaml", "psutil", "ClusterShell")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that share an expensive fixture on one of xdist's workers."""
    for item in items:
        for name in set(SHARED_FIXTURES) & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(name))


@pytest.fixture(scope="session")
def foreign_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python of a user's own, made once: with PyTorch, without Muri and without what Muri is made with."""
    folder = tmp_path_factory.mktemp("own") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python3"
    packages = Path(str(distribution("torch").locate_file("")))
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    for name in _PARTS_OF_TORCH:
        if (packages / name).exists():
            (Path(own) / name).symlink_to(packages / name)
    lacks = "; ".join(f"assert find_spec({name!r}) is None, {name!r}" for name in _FOREIGN)
    subprocess.run([python, "-c", f"from importlib.util import find_spec; {lacks}; import torch"], check=True, cwd="/")
    return python


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
