"""The deliberate bugs of `scripts/mutation-check`, which `make test-all` puts in one by one."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_every_deliberate_bug_still_fits_the_product():
    done = subprocess.run([ROOT / "scripts" / "mutation-check", "--list"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count = re.search(r"^(\d+) bugs$", done.stdout, re.MULTILINE)
    assert count is not None
    assert int(count[1]) >= 60
