"""How often pilot jobs and members ask slurmctld something; docs/operations.md has the same numbers."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from virtual_clock import VirtualClock

from muri.group_spec import GroupSpec, MemberSpec
from muri.slurm_plugin.gateway.base import slurm_error
from muri.slurm_plugin.node import dry_run, pilot, slurm_calls
from muri.slurm_plugin.node.membership import SlurmMembership, requeue_member
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.comment_tags import MemberState, Original

PILOT = 90
OPERATIONS = Path(__file__).resolve().parents[3] / "docs" / "operations.md"

_READ = re.compile(r"squeue --noheader --local --Format=\S+ --jobs=(\d+) --states=all")
_CHANGE = re.compile(r"scontrol (update jobid=(\d+) comment=.*|requeue(hold)? incomplete \d+)", re.DOTALL)
_SCRIPT = re.compile(r"scontrol write batch_script \d+ -")


DRY_RUN = ["--target=1", "--token=t", "--limits=auto", "--time-limit-s=5"]


class Slurm:
    """squeue and scontrol, which count; each call is about one job.

    Attributes:
        clock: The time.
        states: The members' states.
        calls: How often each was called.
    """

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.states = {1: "PENDING", 2: "PENDING"}
        self.calls: Counter[str] = Counter()

    def run(self, action: str, arguments: list[str]) -> str:
        line = " ".join(arguments)
        if (read := _READ.fullmatch(line)) is not None:
            self.calls["reads"] += 1
            return self._record(action, int(read[1]))
        self.calls["changes" if _CHANGE.fullmatch(line) else "scripts" if _SCRIPT.fullmatch(line) else line] += 1
        return "#!/bin/sh\n"

    def _record(self, action: str, job_id: int) -> str:
        if job_id == PILOT:
            return _line(PILOT, "RUNNING", tags.PILOT_PREFIX + tags.format_pilot("start", (1, 2)))
        if job_id not in self.states:
            raise slurm_error(action, "Invalid job id specified")
        state = tags.format_state(MemberState(PILOT, Original("gres/gpu:1", "", 1, 1, 0, 0)))
        return _line(job_id, self.states[job_id], f"{tags.STATE_PREFIX}{state} muri-retry-memory:1 muri-gate:licence")

    def counts(self) -> tuple[int, int]:
        """Reads and changes."""
        assert not self.calls.keys() - {"reads", "changes", "scripts"}
        return self.calls["reads"], self.calls["changes"]


def _line(job_id: int, state: str, admin_comment: str) -> str:
    return f"{job_id:<16}{job_id:<16}{'N/A':<32}{state:<32}{'words':<32768}{admin_comment:<32768}\n"


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    slurm = Slurm()
    monkeypatch.setattr(slurm_calls, "_COMMANDS", slurm)
    monkeypatch.setenv("SLURM_JOB_ID", str(PILOT))
    return slurm


def documented(who: str) -> tuple[int, int]:
    """The reads and changes that the documentation names."""
    (found,) = re.findall(rf"^\| {re.escape(who)} \| (\d+) \| (\d+) \|", OPERATIONS.read_text(), re.MULTILINE)
    return int(found[0]), int(found[1])


class Runtime:
    """A runtime whose members work for an hour, each iteration as long as the others."""

    def __init__(self, slurm: Slurm, status: Path, *, measured: bool = False) -> None:
        self._slurm = slurm
        self._status = status
        self._measured = measured

    def poll(self) -> None:
        """It runs."""

    def wait(self, _timeout: float) -> None:
        """It ends at once."""

    def tell(self, state: str) -> None:
        """Write the status."""
        times = dict.fromkeys(("load", "preprocess", "propagate", "synchronize"), 0.1)
        figures = {"iterations": int(self._slurm.clock() / 0.4), "iteration_s": 0.4, "stage_s": times, "wait_s": times}
        measured = {"iteration_s": 0.4, "iterations": 12, "at": 7.0} if self._measured else None
        member = {"state": state, "sessions": int(state != "waiting"), "measured": measured, **figures}
        self._status.write_text(json.dumps({"members": {"1": member, "2": member}}))

    def live(self) -> None:
        """Members come after 10 s, work for an hour, and their jobs end a second after their training."""
        clock = self._slurm.clock
        self.tell("waiting")
        clock.sleep(10.1)
        self._slurm.states = {1: "RUNNING", 2: "RUNNING"}
        for _ in range(360):
            self.tell("running")
            clock.sleep(10.0)
        self.tell("ended")
        clock.sleep(1.0)
        self._slurm.states = {}


def live(slurm: Slurm, folder: Path, *, measured: bool = False) -> tuple[int, int]:
    """Let a pilot job live with its group; returns its reads and changes."""
    runtime = Runtime(slurm, folder / "status.json", measured=measured)
    group = GroupSpec(members=(MemberSpec(job_id="1"), MemberSpec(job_id="2")))
    slurm.clock.start(runtime.live)
    processes = Mock(look=frozenset)  # /proc may show other tests' members
    watch = pilot.PilotWatch(group, folder / "status.json", lambda: cast("Any", runtime), processes, slurm.clock)
    assert watch.watch() == 0
    return slurm.counts()


def test_a_pilot_job_of_an_hour_asks_little(slurm: Slurm, tmp_path: Path) -> None:
    assert live(slurm, tmp_path) == documented("a pilot job, in an hour")


def test_each_measured_member_costs_a_read_and_a_change(slurm: Slurm, tmp_path: Path) -> None:
    reads, changes = documented("a pilot job, in an hour")
    read, change = documented("its member, measured in place")
    assert live(slurm, tmp_path, measured=True) == (reads + 2 * read, changes + 2 * change)


@pytest.mark.parametrize(
    ("who", "what"),
    [
        ("a member that comes before its group's runtime, or joins later", lambda member: member.await_place("1")),
        ("the runtime that a member joins later", lambda member: member.place_of("1")),
        ("a member that declares its first checkpoint", lambda member: member.declare_checkpoint("1", 0)),
        ("a member that is saved and stopped", lambda member: member.runs("1") and member.requeue_stopped("1", 0)),
        ("a member whose group broke", lambda member: member.requeue("1", "it broke")),
        ("a pilot job that ends before its members, for each", lambda _: requeue_member(1, PILOT)),
        ("a member that ran out of GPU memory", lambda member: member.requeue_for_memory("1")),
        ("a dry run", lambda _: dry_run.main(DRY_RUN, standalone_mode=False)),
    ],
)
def test_a_member_asks_once_for_each_thing(
    slurm: Slurm, capsys: pytest.CaptureFixture[str], who: str, what: Callable[[SlurmMembership], object]
) -> None:
    slurm.states[1] = "RUNNING"
    try:
        what(SlurmMembership(slurm.clock))
    except SystemExit:
        assert who == "a dry run"
    assert slurm.counts() == documented(who)
    capsys.readouterr()
