"""Write the recorded answers anew: `.venv/bin/python tests/golden/record.py [CASE...]` (all, without names)."""

import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from golden_cases import CASES
from golden_run import inputs_of, outputs_of

RECORDED = Path(__file__).parent / "recorded"


def record(name: str) -> None:
    """Write one situation and its answers."""
    case, folder = CASES[name](), RECORDED / name
    with tempfile.TemporaryDirectory() as site, pytest.MonkeyPatch.context() as patch:
        texts = inputs_of(case) | outputs_of(case, Path(site), patch)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or CASES:
        record(wanted)
        print(wanted)
