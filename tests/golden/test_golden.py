"""Recorded situations and what Muri makes of them, byte for byte.

`recorded/<case>/` holds the situation and every answer to it. After a change that is meant to give other answers,
write them anew and read the difference before committing it:

    .venv/bin/python tests/golden/record.py [CASE...]
"""

from pathlib import Path

import pytest
from golden_cases import CASES
from golden_run import inputs_of, outputs_of

RECORDED = Path(__file__).parent / "recorded"


def test_every_recorded_situation_is_looked_at():
    assert {path.name for path in RECORDED.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_same_situation_same_answer(name, tmp_path, monkeypatch):
    case, folder = CASES[name](), RECORDED / name
    found = inputs_of(case) | outputs_of(case, tmp_path, monkeypatch)
    assert {path.name for path in folder.iterdir()} == set(found)
    for file, text in found.items():
        assert text == (folder / file).read_text(encoding="utf-8"), f"{name}/{file}"
