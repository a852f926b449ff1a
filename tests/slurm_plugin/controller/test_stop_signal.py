"""SIGTERM ends a controller between two calls to Slurm, in a process of its own; the next controller goes on."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import fake_slurm
import pytest

from muri.slurm_plugin.controller.stop import StopSignal

CONTROLLER = """
import json, os, pickle, sys
from pathlib import Path
from fake_slurm import FOUR_KINDS, NOW_S, FakeSlurm, behind_licence, four_jobs, make_job, make_node
from muri.profiler.store import ProfileStore
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.assemble import open_controller
from muri.slurm_plugin.controller.loop import run_once
from muri.slurm_plugin.controller.stop import StopSignal
from muri.slurm_plugin.controller.surroundings import Surroundings

place, number, after = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
alone = [make_job(n, admin_comment="muri:model=m1,batch-size=8,alone=1") for n in range(5, 15)]
jobs = [behind_licence(job) for job in four_jobs() + alone]
slurm = FakeSlurm(jobs, [make_node("n1", gpu_count=11, cpu_count=96)], gate_license=True)
slurm.extend_lease(NOW_S + 600)
before = place / "slurm"
if before.exists():
    slurm.__dict__.update(pickle.loads(before.read_bytes()))
else:
    with ProfileStore(place / "profiles.db") as store:
        store.put_all(FOUR_KINDS)
calls = []

def take_note(name):
    calls.append(name)
    if len(calls) == after:
        os.kill(os.getpid(), number)

slurm.after_call = take_note
stop = StopSignal()
stop.heed_signals()
config = Config(state_dir=place, status_dir=place / "status", policy="muri-s", profiling={"mode": "dry-run"})
with open_controller(config, slurm, surroundings=Surroundings(stop)) as controller:
    run_once(controller, 0.0, stop)
slurm.tick()
before.write_bytes(pickle.dumps({name: value for name, value in vars(slurm).items() if not name.endswith("_call")}))
errors = json.loads((place / "status.json").read_text())["errors"]
waiting = [job.job_id for job in slurm.jobs.values() if job.state.value == "PENDING"]
print(json.dumps({"calls": calls, "errors": errors, "starts": slurm.starts, "waiting": waiting}))
"""

JOBS: Final = range(1, 15)


def cycle(place: Path, number: int = 0, after: int = 0) -> dict[str, Any]:
    """Run a controller's cycle in a process that gets a signal after so many calls."""
    environment = {**os.environ, "PYTHONPATH": str(Path(fake_slurm.__file__).parent)}
    command = [sys.executable, "-c", CONTROLLER, str(place), str(number), str(after)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("after", [1, 3, 8])
def test_after_the_signal_no_call_is_made_and_the_next_controller_starts_each_job_once(
    tmp_path: Path, number: int, after: int
) -> None:
    told = cycle(tmp_path, number, after)
    assert len(told["calls"]) == after
    assert any("left for the next cycle: the controller was told to stop" in error for error in told["errors"])
    assert told["waiting"]
    last = cycle(tmp_path)
    assert last["waiting"] == []
    assert {job: last["starts"].get(str(job)) for job in JOBS} == dict.fromkeys(JOBS, 1)


def test_a_process_that_waits_ends_when_told() -> None:
    code = (
        "from muri.slurm_plugin.controller.stop import StopSignal\n"
        "stop = StopSignal(); stop.heed_signals(); print('waits', flush=True)\n"
        "print(stop.wait(600.0), stop.is_set())"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.terminate()
        assert process.communicate()[0] == "True True\n"
        assert process.returncode == 0


def test_a_signal_may_come_at_any_moment_of_waiting_and_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, really = StopSignal(), select.select

    def interrupted(*arguments: Any) -> Any:
        stop.set()
        stop.set()
        return really(*arguments)

    monkeypatch.setattr(select, "select", interrupted)
    assert not stop.is_set()
    assert stop.wait(600.0)
    assert stop.wait(600.0)
