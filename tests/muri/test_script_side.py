"""The guard of what scripts import: scripts/check_script_side.py finds features that an old Python lacks."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import check_script_side  # noqa: E402

PROJECT = """
[tool.setuptools.package-dir]
muri = "muri"
"muri.launcher" = "launcher"

[tool.ruff.per-file-target-version]
"launcher/{one,two}.py" = "py38"
"launcher/new.py" = "py311"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small project whose listed files import nothing else."""
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "launcher").mkdir()
    for name in ("one", "two", "new"):
        (tmp_path / "launcher" / f"{name}.py").write_text('"""Nothing."""\n')
    return tmp_path


def faults(project: Path, text: str) -> list[str]:
    (project / "launcher" / "one.py").write_text(text)
    return check_script_side.faults(project, ("muri.launcher.one",))


def test_what_is_there_already_is_no_fault(project: Path) -> None:
    text = """
    from __future__ import annotations
    from typing import TYPE_CHECKING, Tuple, Union
    if TYPE_CHECKING:
        from muri.launcher.new import later
    Pair = Tuple[int, int]
    def first(pair: tuple[int, int] | None, flags: int = 1 | 2) -> list[int]:
        from muri.launcher.two import anything
        return [*pair] if isinstance(pair, (list, tuple)) else []
    """
    assert faults(project, text.replace("\n    ", "\n")) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Pair = tuple[int, int]", "tuple[…]"),
        ("Number = int | float", "joined by |"),
        ("name = 'a.b'.removesuffix('.b')", ".removesuffix()"),
        ("from itertools import pairwise", "pairwise"),
        ("import dataclasses\n@dataclasses.dataclass(slots=True)\nclass A: pass", "slots"),
        ("match 1:\n    case 1: pass", "match"),
        ("def late():\n    from muri.launcher.new import anything", "muri.launcher.one imports it"),
    ],
)
def test_what_an_old_python_lacks_is_found(project: Path, text: str, fault: str) -> None:
    assert fault in "\n".join(faults(project, text))
