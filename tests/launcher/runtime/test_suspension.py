"""Members whose jobs are suspended: Slurm stops the script; where it is a thread, `muri run`, and then its training."""

import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from launcher_harness import Launcher, Process, ends
from polling import until
from ranks_harness import RankedLauncher

from muri.group_spec import MemberSpec
from muri.launcher.arbitration.arbiter import PausingArbiter
from muri.launcher.arbitration.disciplines import FairArbiter
from muri.launcher.job.stage_clock import IterationRecord, StageClock
from muri.launcher.runtime import member_table
from muri.launcher.runtime.hangs import SuspensionWatch, frozen
from muri.launcher.runtime.member_table import Member

TRAIN = """
    import os, sys, time
    import muri
    own, stop = sys.argv[1:]
    for step in muri.batches(range(10**9)):
        with muri.stage("propagate"):
            time.sleep(0.005)
        with open(own, "a") as file:
            print(step, file=file)
        if os.path.exists(stop):
            break
    print("finished", flush=True)
"""


class Pair:
    """Members 101, whose job is suspended, and 102; each counts its iterations in a file."""

    def __init__(self, launcher: Launcher, *options: str, **environment: str) -> None:
        self.launcher, self.environment = launcher, environment
        launcher.threads("101", "102", options=options)
        self.script, self.stop = launcher.script(TRAIN), launcher.folder / "stop"
        self.members: dict[str, Process] = {}
        for job in ("101", "102"):
            self.start(job)

    def start(self, job: str) -> None:
        """Start a member's script, and wait until it trains."""
        self.members[job] = self.launcher.member(job, self.script, self.steps(job), self.stop, **self.environment)
        self.advances(job, 3)

    def steps(self, job: str) -> Path:
        return self.launcher.folder / f"{job}.steps"

    def count(self, job: str) -> int:
        return self.steps(job).read_text().count("\n") if self.steps(job).exists() else 0

    def advances(self, job: str, iterations: int) -> None:
        """Wait until the member has done some more iterations."""
        count = self.count(job) + iterations
        until(lambda: self.count(job) >= count, f"{iterations} iterations of {job}")

    def status(self) -> dict:
        return self.launcher.status()["members"]["101"]

    def suspend(self) -> None:
        """Stop 101's `muri run` as `scontrol suspend` does, and wait until the runtime has noticed."""
        self.members["101"].send_signal(signal.SIGSTOP)
        until(lambda: self.status()["paused"], "the pause")

    def resume(self) -> None:
        self.members["101"].send_signal(signal.SIGCONT)
        until(lambda: not self.status()["paused"], "the end of the pause")


@pytest.mark.parametrize(
    ("isolation", "discipline"),
    [
        ("thread", "lockstep"),
        ("process", "fair"),
        *(pytest.param(*way, marks=pytest.mark.thorough) for way in (("thread", "fair"), ("process", "plain"))),
    ],
)
def test_a_suspended_members_training_stops_and_goes_on_and_its_partner_never_stops(
    launcher: Launcher, isolation: str, discipline: str
) -> None:
    pair = Pair(launcher, "--discipline", discipline, MURI_ISOLATION=isolation)
    pair.suspend()
    before = pair.count("101")
    pair.advances("102", 50)
    status = pair.status()
    assert (status["state"], status["iterations_per_s"], status["speed"]) == ("running", None, None)
    assert pair.count("101") <= before + 1
    pair.resume()
    pair.advances("101", 10)
    pair.advances("102", 10)
    pair.stop.touch()
    assert [ends(member) for member in pair.members.values()] == [0, 0], launcher.err("101")
    assert launcher.out("101") == "finished\n"


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_suspended_member_can_be_cancelled_or_killed_and_its_runtime_ended(
    launcher: Launcher, isolation: str
) -> None:
    pair = Pair(launcher, MURI_ISOLATION=isolation)
    pair.suspend()
    pair.members["101"].send_signal(signal.SIGTERM)
    pair.members["101"].send_signal(signal.SIGCONT)  # Slurm continues cancelled jobs
    assert ends(pair.members["101"]) == (143 if isolation == "thread" else -signal.SIGTERM)
    pair.start("101")
    pair.suspend()
    pair.members["101"].send_signal(signal.SIGKILL)
    until(lambda: pair.status()["state"] == "ended", "the end of the script")
    pair.advances("102", 10)
    pair.members["102"].send_signal(signal.SIGSTOP)
    until(lambda: launcher.status()["members"]["102"]["paused"], "the pause")
    launcher.processes[0].terminate()
    assert ends(launcher.processes[0]) == 0
    pair.members["102"].send_signal(signal.SIGKILL)


def test_all_ranks_of_a_suspended_member_pause_and_the_others_go_on(launcher: Launcher) -> None:
    ranked = RankedLauncher(launcher, 2)
    ranked.start("101", "102")
    suspended, other = (ranked.member(job, 1, 10**6, -1, "explicit") for job in ("101", "102"))

    def lines(job: str) -> list[int]:
        return [ranked.out(job, rank).count("\n") for rank in range(2)]

    def advances(job: str, count: int) -> None:
        wanted = [before + count for before in lines(job)]
        until(lambda: all(now >= want for now, want in zip(lines(job), wanted, strict=True)), f"{count} steps of {job}")

    advances("101", 5)
    advances("102", 5)
    for process in suspended:
        process.send_signal(signal.SIGSTOP)
    until(lambda: launcher.status()["members"]["101"]["paused"], "the pause")
    before = lines("101")
    advances("102", 30)
    assert all(now <= then + 2 for now, then in zip(lines("101"), before, strict=True))
    for process in suspended:
        process.send_signal(signal.SIGCONT)
    advances("101", 5)
    advances("102", 5)
    assert [process.poll() for process in (*suspended, *other)] == [None] * 4


def test_an_iteration_with_a_pause_counts_but_tells_no_times() -> None:
    now_s = 0.0
    told: list[IterationRecord] = []
    clock = StageClock(now=lambda: now_s)
    clock.on_record = told.append
    clock.ask_batch()
    now_s = 1.0
    clock.ask_batch()
    clock.note_pause()
    now_s = 3601.0
    clock.ask_batch()
    now_s = 3602.0
    clock.end_iteration()
    assert clock.iterations == 3
    assert [record.iteration_s for record in clock.recent] == [record.iteration_s for record in told] == [1.0, 1.0]


def a_session() -> SimpleNamespace:
    """A session of a process."""
    return SimpleNamespace(
        member="101", paused=False, client_pid=7, clock=StageClock(), script_pid=None, ended=threading.Event(),
        isolation="process",
    )  # fmt: skip


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_member_is_paused_while_its_process_is_stopped(isolation: str) -> None:
    session, states = a_session(), iter([False, True, True, False, False])
    session.isolation = isolation
    arbiter = PausingArbiter(FairArbiter())
    arbiter.join("101")
    arbiter.acquire("101", 2)
    watch = SuspensionWatch(lambda: [session], arbiter, lambda _pid: next(states))
    for paused in (False, True, True, False, False):
        watch.check()
        assert session.paused is paused
        assert arbiter.holders()[2] == (None if paused or session.clock._paused_within else "101")


def test_who_cannot_be_seen_or_has_to_end_is_not_paused() -> None:
    session = a_session()
    watch = SuspensionWatch(lambda: [session], PausingArbiter(FairArbiter()), lambda _pid: True)
    session.client_pid = 0
    watch.check()
    assert not session.paused
    session.client_pid = 7
    watch.check()
    assert session.paused
    watch.close()
    watch.check()
    assert not session.paused
    assert not session.clock.count(IterationRecord(3600.0, (0.0,) * 4, (0.0,) * 4)), "the pause fell into it"


@pytest.mark.parametrize(
    ("line", "file", "text", "expected"),
    [
        ("0::/slurm/job_7/step_0", "slurm/job_7/step_0/cgroup.events", "populated 1\nfrozen 1\n", True),
        ("0::/slurm/job_7/step_0", "slurm/job_7/step_0/cgroup.events", "populated 1\nfrozen 0\n", False),
        ("3:freezer:/slurm/job_7", "freezer/slurm/job_7/freezer.state", "FROZEN\n", True),
        ("3:freezer:/slurm/job_7", "freezer/slurm/job_7/freezer.state", "THAWED\n", False),
        ("5:cpu,cpuacct:/slurm/job_7", "freezer/slurm/job_7/freezer.state", "FROZEN\n", False),
        ("3:freezer:/slurm/job_7", "elsewhere", "FROZEN\n", False),
    ],
)
def test_a_frozen_control_group_is_seen(tmp_path: Path, line: str, file: str, text: str, expected: bool) -> None:
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "cgroup").write_text(f"1:name=systemd:/\n{line}\n")
    (tmp_path / "groups" / file).parent.mkdir(parents=True)
    (tmp_path / "groups" / file).write_text(text)
    assert frozen(7, tmp_path / "groups", tmp_path / "proc") is expected
    assert frozen(8, tmp_path / "groups", tmp_path / "proc") is False


def test_the_time_of_a_pause_is_no_slowness(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(member_table, "time", SimpleNamespace(monotonic=lambda: now_s))
    session = a_session()
    session.isolation, session.checkpointed, session.exit_code = "thread", False, None
    session.clock.recent.append(IterationRecord(0.1, (0.1,) * 4, (0.0,) * 4))
    member = Member(MemberSpec("1"), session=session, state="running")
    assert member.status()["iterations_per_s"] == 10.0
    now_s, session.paused = 100.0, True
    paused = member.status()
    assert (paused["paused"], paused["iterations_per_s"], paused["speed"]) == (True, None, None)
    now_s, session.paused = 200.0, False
    assert member.status()["iterations_per_s"] == 10.0
