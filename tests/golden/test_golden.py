"""Recorded situations and what Muri makes of them, byte for byte.

`recorded/<case>/` holds a situation (`golden_run.Case`) and every answer to it. A new situation begins as a copy of
another's folder. After a change that is meant to give other answers, write them anew and read the difference before
committing it:

    .venv/bin/python tests/golden/record.py [CASE...]
"""

import pytest
from golden_run import RECORDED, Case, outputs_of


@pytest.mark.parametrize("name", sorted(path.name for path in RECORDED.iterdir()))
def test_same_situation_same_answer(name, tmp_path, monkeypatch):
    for file, text in outputs_of(Case.of(RECORDED / name), tmp_path, monkeypatch).items():
        assert text == (RECORDED / name / file).read_text(encoding="utf-8"), f"{name}/{file}"
