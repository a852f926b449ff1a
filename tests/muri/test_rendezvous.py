"""Which directory members and their runtime meet in; newcomers: few at a time, and none for long."""

import os
import select
import socket
from pathlib import Path

from virtual_clock import VirtualClock

from muri.files import Newcomers, default_run_dir, make_run_dir


def test_the_one_that_root_has_made_comes_first(tmp_path: Path) -> None:
    in_tmp = Path(f"/tmp/muri-{os.geteuid()}")
    assert default_run_dir({}, tmp_path) == in_tmp
    made = tmp_path / str(os.geteuid())
    made.mkdir(mode=0o700)
    assert default_run_dir({}, tmp_path) == made
    make_run_dir(made)
    assert default_run_dir({"MURI_RUN_DIR": "/elsewhere"}, tmp_path) == Path("/elsewhere")


def test_the_oldest_ends_for_one_more_and_each_after_a_time() -> None:
    clock = VirtualClock()
    newcomers = Newcomers(3, clock)
    pairs = [socket.socketpair() for _ in range(5)]
    ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    for raw in ours:
        newcomers.add(raw)
        clock.sleep(1.0)
    assert select.select(theirs, [], [], 0.0)[0] == theirs[:2], "who was ended sees it"
    assert [newcomers.take(raw) for raw in ours[1:3]] == [False, True]
    theirs[3].send(b"speaks")
    newcomers.end_older(2.0)
    assert select.select(theirs, [], [], 0.0)[0] == [*theirs[:2], theirs[3]]
    for raw in (*ours, *theirs):
        raw.close()
