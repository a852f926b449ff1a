"""The check of sizes fails above a ceiling, says by how much, and lowers ceilings only."""

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    loader = SourceFileLoader("size", str(ROOT / "scripts" / "size"))
    spec = spec_from_loader("size", loader)
    assert spec
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "size", module)  # its dataclasses look themselves up
    loader.exec_module(module)
    (tmp_path / "size.yaml").write_text(
        'core lines: {"0.2": 9, goal: 5, ceiling: 100}\nkeys: {"0.2": 1, goal: 2, ceiling: 30}\n'
    )
    monkeypatch.setattr(module, "BUDGET", tmp_path / "size.yaml")
    return module


def test_a_ceiling_that_is_exceeded_fails_and_says_by_how_much(
    size: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    size.check({"core lines": 100, "keys": 30})
    assert "over the ceiling" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"core lines: take something away"):
        size.check({"core lines": 112, "keys": 30})
    assert "12 over the ceiling" in capsys.readouterr().out


def test_ceilings_only_fall(size: ModuleType) -> None:
    size.lower({"core lines": 90, "keys": 31})
    assert [line.split("ceiling: ")[1] for line in size.BUDGET.read_text().splitlines()] == ["90}", "30}"]


def test_generated_tables_and_marks_are_no_words(size: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("Two words<!-- figure: a b -->\n<!-- table: t -->\n| many | words |\n<!-- /table -->\n")
    room = size.Room()
    size._count(page, "docs/a.md", room)
    assert room.words == 2
