"""Files that are replaced in one step or written whole, run directories, and newcomers at a socket."""

import json
import os
import select
import socket
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest
from virtual_clock import VirtualClock

from muri.files import Newcomers, atomic_json, default_run_dir, make_run_dir, write_atomically


def test_a_file_is_replaced_with_its_permissions_and_nothing_else_stays(tmp_path):
    path = tmp_path / "status.json"
    atomic_json(path, {"b": 1, "a": 2}, 0o644, indent=1, sort_keys=True)
    assert path.read_text() == '{\n "a": 2,\n "b": 1\n}\n'
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    atomic_json(path, [])
    assert json.loads(path.read_text()) == []
    assert list(tmp_path.iterdir()) == [path]


def test_a_document_that_cannot_be_written_leaves_the_old_file(tmp_path):
    path = tmp_path / "status.json"
    write_atomically(path, "old")
    with pytest.raises(TypeError):
        atomic_json(path, {"no": object()})
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "missing" / "status.json", "new")
    assert path.read_text() == "old"


def test_a_link_is_replaced_and_not_followed(tmp_path):
    path, precious = tmp_path / "status.json", tmp_path / "precious"
    precious.write_text("precious")
    path.symlink_to(precious)
    (tmp_path / f".status.json.{os.getpid()}").symlink_to(precious)  # where the draft will be
    write_atomically(path, "new", 0o600)
    assert (path.read_text(), precious.read_text()) == ("new", "precious")
    assert not path.is_symlink()
    assert sorted(tmp_path.iterdir()) == [precious, path]


def test_a_draft_is_never_wider_than_the_file(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(os, "fchmod", lambda handle, _mode: seen.append(stat.S_IMODE(os.fstat(handle).st_mode)))
    write_atomically(tmp_path / "own.json", "secret", 0o400)
    assert seen == [0o400]


def test_where_a_file_system_knows_no_readers_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "setxattr", Mock(side_effect=OSError(95, "Operation not supported")))
    with pytest.raises(OSError, match="not supported"):
        write_atomically(tmp_path / "own.json", "secret", 0o400, reader=4711)
    assert list(tmp_path.iterdir()) == []


def test_the_one_that_root_has_made_comes_first(tmp_path: Path) -> None:
    in_tmp = Path(f"/tmp/muri-{os.geteuid()}")
    assert default_run_dir({}, tmp_path) == in_tmp
    made = tmp_path / str(os.geteuid())
    made.mkdir(mode=0o700)
    assert default_run_dir({}, tmp_path) == made
    make_run_dir(made)
    assert default_run_dir({"MURI_RUN_DIR": "/elsewhere"}, tmp_path) == Path("/elsewhere")


def test_a_container_that_maps_the_user_to_root_finds_the_one_of_the_jobs_user(tmp_path, monkeypatch):
    of_job = tmp_path / "4711"
    of_job.mkdir(mode=0o700)
    assert default_run_dir({"SLURM_JOB_UID": "4711"}, tmp_path) == of_job
    assert default_run_dir({"SLURM_JOB_UID": "../4711"}, tmp_path) == Path(f"/tmp/muri-{os.geteuid()}")
    monkeypatch.setattr(os, "geteuid", lambda: of_job.stat().st_uid + 1)
    assert default_run_dir({"SLURM_JOB_UID": "4711"}, tmp_path) == Path(f"/tmp/muri-{os.geteuid()}")


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
