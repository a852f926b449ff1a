"""Write the recorded answers anew: `.venv/bin/python tests/golden/record.py [CASE...]` (all, without names)."""

import sys
import tempfile
from pathlib import Path

import pytest
from golden_run import RECORDED, Case, outputs_of

for name in sys.argv[1:] or sorted(path.name for path in RECORDED.iterdir()):
    with tempfile.TemporaryDirectory() as site, pytest.MonkeyPatch.context() as patch:
        for file, text in outputs_of(Case.of(RECORDED / name), Path(site), patch).items():
            (RECORDED / name / file).write_text(text, encoding="utf-8")
    print(name)
