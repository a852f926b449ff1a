"""The pilot job's monitor: which processes it looks at, the file that it writes, and that its failures do no harm."""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from polling import DEADLINE_S, until

from muri.files import use_file
from muri.slurm_plugin.node import pilot_watches
from muri.slurm_plugin.node.member_processes import MemberProcesses
from muri.slurm_plugin.node.pilot_watches import NodeMonitor, never_attached, read_status, watched_processes


def write(status: Path, **members: dict[str, Any]) -> None:
    status.write_text(json.dumps({"pid": 1, "members": members}))


def test_each_member_is_measured_by_all_processes_of_its_job_and_threads_by_none() -> None:
    members = {
        "1": {"state": "running", "script_pid": 11, "isolation": "process"},
        "2": {"state": "running", "isolation": "thread"},
        "3": {"state": "ended", "script_pid": 13},
        "4": {"state": "running", "script_pid": 14},
    }
    found = {"1": [10], "2": [20], "3": [30], "5": [50, 51]}
    assert watched_processes(members, found) == {"1": {10, 11}, "3": {30}, "4": {14}, "5": {50, 51}}


def test_members_with_processes_and_no_script_so_far_share_plainly() -> None:
    members = {"1": {"sessions": 1}, "2": {"sessions": 0}, "3": {"sessions": 0}}
    assert never_attached(members, {"1": [1], "2": [2], "4": [4]}) == ["2", "4"]


@pytest.mark.parametrize("text", ["", "[]", '{"members": {"1": 3}}', '{"members": 3}', "3"])
def test_a_damaged_status_has_no_members(tmp_path: Path, text: str) -> None:
    status = tmp_path / "pilot-7.json"
    assert read_status(status)["members"] == {}
    status.write_text(text)
    assert read_status(status)["members"] == {}


def test_the_file_beside_the_status_tells_the_use_until_the_pilot_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pilot_watches, "_TURN_S", 0.1)
    monkeypatch.setattr("muri.profiler.usage.Throttle.due", lambda _throttle: True)
    status = tmp_path / "pilot-7.json"
    write(status, **{"1": {"state": "running", "script_pid": os.getpid(), "sessions": 1}, "2": {"state": "waiting"}})
    processes = MemberProcesses(7)
    processes.found = {"2": frozenset({os.getpid()})}
    monitor = NodeMonitor(status, processes)
    monitor.start()
    until(lambda: monitor.latest is not None and use_file(status).exists(), "the second look")
    told = json.loads(use_file(status).read_text())
    assert told["jobs"]["1"]["mem_gib"] > 0
    assert told["jobs"]["2"]["mem_gib"] > 0
    assert told["plain"] == ["2"]
    assert told["node"]["cpu_count"] == os.cpu_count()
    assert told["updated"]
    monkeypatch.setattr(pilot_watches, "_TURN_S", DEADLINE_S)  # a look that has begun may take as long as it likes
    monitor.close()
    assert not use_file(status).exists()


def test_a_failure_ends_the_figures_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pilot_watches, "watched_processes", Mock(side_effect=RuntimeError("no /proc")))
    monitor = NodeMonitor(tmp_path / "pilot-7.json", MemberProcesses(7))
    monitor.start()
    monitor.close()
    assert monitor.latest is None
