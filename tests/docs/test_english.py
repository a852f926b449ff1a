"""The check of English finds its patterns in what people read, and lets a file move from folder to folder."""

import importlib.util
import re
from collections import Counter
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
    ("name", "source", "kinds"),
    [
        ("a.md", "Nobody waits, `nobody` does.\n\n    nobody\n", ["pages"]),
        ("a.py", '"""Nobody waits."""\n# whoever\nx = "this is no number"\n', ["words", "words", "messages"]),
        ("a.lua", '-- for whom\nlog("a licence is gone")\n', ["words", "messages"]),
        ("a.md", "There is no queue, and it is no longer than needed. What is it?\n", []),
    ],
)
def test_it_finds_its_patterns_where_people_read(english: ModuleType, name: str, source: str, kinds: list[str]) -> None:
    found = [
        kind
        for kind, _, text in english.texts_of(name, source)
        for pattern in english.PATTERNS.values()
        for _ in re.finditer(pattern, text, re.MULTILINE)
    ]
    assert sorted(found) == sorted(kinds)


def test_a_file_may_move_but_the_sum_may_not_grow(english: ModuleType) -> None:
    allowed = {"core": {"words": 3}, "lab": {"words": 1}}
    assert english.compare(Counter({("lab", "words"): 4}), allowed) == []
    (line,) = english.compare(Counter({("core", "words"): 3, ("lab", "words"): 2}), allowed)
    assert "5 places, 4 allowed" in line and "in lab" in line
