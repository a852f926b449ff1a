"""The notebook of the documentation runs, cell by cell, as the page says: in the folder docs/."""

import json
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(DOCS)
    names: dict[str, Any] = {}
    cells = json.loads((DOCS / "first-study.ipynb").read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "clear the outputs before you commit it"
            exec("".join(cell["source"]), names)
    printed = capsys.readouterr().out
    assert printed.count("times as fast as fifo") == 3
    assert names["hours"]["muri-jct"] < names["hours"]["fifo"]
