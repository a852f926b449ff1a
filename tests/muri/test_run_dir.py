"""Which directory members and their runtime meet in."""

import os
from pathlib import Path

from muri.run_dir import default_run_dir, make_run_dir


def test_the_one_that_root_has_made_comes_first(tmp_path: Path) -> None:
    in_tmp = Path(f"/tmp/muri-{os.geteuid()}")
    assert default_run_dir({}, tmp_path) == in_tmp
    made = tmp_path / str(os.geteuid())
    made.mkdir(mode=0o700)
    assert default_run_dir({}, tmp_path) == made
    make_run_dir(made)
    assert default_run_dir({"MURI_RUN_DIR": "/elsewhere"}, tmp_path) == Path("/elsewhere")
