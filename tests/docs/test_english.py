"""The check of English finds its patterns in texts that people read, and British spelling in names."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def english() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_english", ROOT / "scripts" / "check_english.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "source", "lines"),
    [
        ("a.md", "Nobody waits, `nobody` does.\n\n    nobody\n", [1]),
        ("a.py", '"""Nobody waits."""\n# whoever\nx = "this is no number"\n', [1, 2, 3]),
        ("a.py", "is_behind_licence = 1\ngate = 'licence'\nis_cancelled = 1\nanalysed = 1\n", [1, 4]),
        ("a.py", "tag = 'muri:on muri-gate:licence'\n", []),
        ("a.lua", '-- for whom\nlog("a licence is gone")\n', [1, 2]),
        ("a.md", "There is no queue, and it is no longer than needed. What is it?\n", []),
    ],
)
def test_it_finds_its_patterns_where_people_read(english: ModuleType, name: str, source: str, lines: list[int]) -> None:
    assert sorted(line for line, _, _ in english.faults(name, source)) == lines
