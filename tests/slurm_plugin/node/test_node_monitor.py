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
from muri.slurm_plugin.node.pilot_watches import NodeMonitor, script_pids


def write(status: Path, **members: dict[str, Any]) -> None:
    status.write_text(json.dumps({"pid": 1, "members": members}))


def test_scripts_with_a_process_that_run_are_looked_at(tmp_path: Path) -> None:
    status = tmp_path / "pilot-7.json"
    assert script_pids(status) == {}
    write(status, **{"1": {"state": "running", "script_pid": 11}, "2": {"state": "ended", "script_pid": 12},
                     "3": {"state": "running", "script_pid": None}, "4": {"state": "running"}})  # fmt: skip
    assert script_pids(status) == {"1": 11}
    for text in ("", "[]", '{"members": {"1": 3}}', "3"):
        status.write_text(text)
        assert script_pids(status) == {}


def test_the_file_beside_the_status_tells_the_use_until_the_pilot_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pilot_watches, "_TURN_S", 0.1)
    monkeypatch.setattr("muri.profiler.usage.Throttle.due", lambda _throttle: True)
    status = tmp_path / "pilot-7.json"
    write(status, **{"1": {"state": "running", "script_pid": os.getpid()}})
    monitor = NodeMonitor(status)
    monitor.start()
    until(lambda: monitor.latest is not None and use_file(status).exists(), "the second look")
    told = json.loads(use_file(status).read_text())
    assert told["jobs"]["1"]["mem_gib"] > 0
    assert told["node"]["cpu_count"] == os.cpu_count()
    assert told["updated"]
    monkeypatch.setattr(pilot_watches, "_TURN_S", DEADLINE_S)  # a look that has begun may take as long as it likes
    monitor.close()
    assert not use_file(status).exists()


def test_a_failure_ends_the_figures_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pilot_watches, "script_pids", Mock(side_effect=RuntimeError("no /proc")))
    monitor = NodeMonitor(tmp_path / "pilot-7.json")
    monitor.start()
    monitor.close()
    assert monitor.latest is None
