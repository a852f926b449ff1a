"""A store in a directory that its reader may not enter: the controller's, for users."""

import os
from pathlib import Path

import pytest

from muri.profiler.errors import StorePermissionError
from muri.profiler.store import ProfileStore


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make itself another user")
@pytest.mark.parametrize("read_only", [False, True])
def test_it_is_a_message_and_no_traceback(tmp_path: Path, read_only: bool) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    os.seteuid(4711)
    try:
        with pytest.raises(StorePermissionError, match="no permission to"):
            ProfileStore(tmp_path / "state" / "profiles.db", read_only=read_only)
    finally:
        os.seteuid(0)
