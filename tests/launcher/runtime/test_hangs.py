"""Processes and members that hang: real ones, ended with a clear cause, and others that only look so."""

import os
import signal
import subprocess
import threading
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
from launcher_harness import Launcher, ends
from polling import until
from ranks_harness import RankedLauncher
from virtual_clock import VirtualClock

from muri.errors import UsageError
from muri.launcher.arbitration.arbiter import PausingArbiter
from muri.launcher.arbitration.disciplines import FairArbiter
from muri.launcher.arbitration.switching import make_arbiter
from muri.launcher.job.environment import DURATIONS_S, seconds_of
from muri.launcher.job.stage_clock import StageClock
from muri.launcher.runtime.hangs import HangWatch, IdleTimer, ThreadMeter, ThreadSample, is_stopped
from muri.launcher.runtime.ranks import IdleReports
from muri.launcher.shared_process.danger_watch import LockWatch

TIMEOUT_S = "1"
SOON = ("--hang-timeout-s", TIMEOUT_S)
AGAIN = {"MURI_REQUEUE_WAIT_S": "0.1"}
WORK = """
    import sys, time
    import muri
    print("starts", flush=True)
    for step in range(int(sys.argv[1])):
        with muri.stage("propagate"):
            time.sleep(0.005)
    print("finished", flush=True)
"""
WAITS = """
    import sys, threading, time
    import muri

    def tell(ident):
        frame = None
        while frame is None or frame.f_code.co_name != "sleep":  # where a thread waits to be granted a resource
            time.sleep(0.01)
            frame = sys._current_frames()[ident]
        print("waits", flush=True)

    threading.Thread(target=tell, args=(threading.get_ident(),)).start()
    with muri.stage("propagate"):
        pass
"""
DEADLOCK = """
    import os, threading
    import muri
    lock = threading.Lock()
    with muri.stage("propagate"):
        print("holds", os.getpid(), flush=True)
        lock.acquire()
        lock.acquire()
"""


def test_a_runtime_ends_at_once_although_a_member_waits_for_one_that_hangs(launcher: Launcher) -> None:
    runtime = launcher.threads("101", "102", options=("--grace-s", "0.5"))
    hung = launcher.member("102", launcher.script(DEADLOCK, "deadlock.py"), **AGAIN)
    launcher.says("102", "holds")
    waits = launcher.member("101", launcher.script(WAITS), **AGAIN)
    launcher.says("101", "waits")
    runtime.terminate()
    assert ends(runtime) == 0
    assert [ends(waits), ends(hung)] == [75, 75]


SILENT = """
    import ctypes, subprocess, sys
    import muri
    busy = "import time\\nend = time.monotonic() + 1.3\\nwhile time.monotonic() < end: pass"
    with muri.stage("propagate"):
        print("holds", flush=True)
        if sys.argv[1] == "works":
            subprocess.run([sys.executable, "-c", busy], check=True)
        else:
            ctypes.CDLL(None).sleep(2)
    print("finished", flush=True)
"""


def test_what_hangs_is_ended_and_what_works_or_may_wait_goes_on(launcher: Launcher) -> None:
    launcher.threads("101", "102", "103", "104", "105", options=SOON)
    silent, deadlock = launcher.script(SILENT, "silent.py"), launcher.script(DEADLOCK, "deadlock.py")
    works = launcher.member("101", silent, "works", MURI_ISOLATION="process")
    launcher.says("101", "holds")
    may_wait = launcher.member("102", silent, "waits", MURI_HANG_TIMEOUT_S="0")
    launcher.says("102", "holds")
    hung = launcher.member("103", deadlock)
    launcher.says("103", "holds")
    stopped = launcher.member("104", deadlock, MURI_ISOLATION="process")
    last = launcher.member("105", launcher.script(WORK), "5")
    os.kill(int(launcher.says("104", "holds").split()[1]), signal.SIGSTOP)
    assert [ends(works), ends(may_wait)] == [0, 0], (launcher.err("101"), launcher.err("102"))
    assert [ends(hung), ends(last)] == [124, 0]
    assert "muri: the script holds a resource for which other jobs wait" in launcher.err("103")
    assert f"has worked for {TIMEOUT_S} s: it hangs" in launcher.err("103")
    assert launcher.out("105") == "starts\nfinished\n"
    assert stopped.poll() is None  # it holds nothing any more, so it may stay stopped
    assert launcher.status()["members"]["104"]["paused"]


KEEPS_THE_INTERPRETER = """
    import ctypes, threading
    import muri
    for _ in range(3):  # from then on they ask for the interpreter all the time
        threading.Thread(target=lambda: [threading.Event().wait(0.01) for _ in iter(int, 1)], daemon=True).start()
    for _ in muri.batches(range(2)):
        pass
    print("keeps", flush=True)
    ctypes.PyDLL(None).sleep(10**6)
"""
DEADLOCKED_POOL = """
    import multiprocessing
    import muri
    fork = multiprocessing.get_context("fork")
    lock = fork.Lock()
    lock.acquire()
    def work(number):
        with lock:
            return number
    for _ in muri.batches(range(2)):
        pass
    with fork.Pool(2) as pool:  # its workers wait for a lock that is never released
        print("waits", flush=True)
        pool.map(work, [1])
"""
WAITS_BEFORE_IT_TRAINS = """
    import sys, time
    import muri
    time.sleep(3)
    for _ in muri.batches(range(2)):
        pass
    print("finished", flush=True)
"""


def test_who_has_stopped_training_is_ended_though_it_holds_nothing_and_who_has_not_begun_may_wait(
    launcher: Launcher,
) -> None:
    launcher.runtime("101", "102", "103", options=SOON)
    frozen = launcher.member("101", launcher.script(KEEPS_THE_INTERPRETER, "keeps.py"))
    deadlocked = launcher.member("102", launcher.script(DEADLOCKED_POOL, "pool.py"))
    waits = launcher.member("103", launcher.script(WAITS_BEFORE_IT_TRAINS, "waits.py"))
    codes = [ends(process) for process in (frozen, deadlocked, waits)]
    assert codes == [-signal.SIGTERM, -signal.SIGTERM, 0], launcher.err("102") + launcher.err("103")
    assert [launcher.out(job) for job in ("101", "102", "103")] == ["keeps\n", "waits\n", "finished\n"]
    for job in ("101", "102"):
        assert "muri: the script has stopped in the middle of its training, and nothing of it" in launcher.err(job)


@pytest.mark.parametrize("name", DURATIONS_S)
def test_a_duration_that_is_none_is_refused(launcher: Launcher, name: str) -> None:
    for value in ("-1", "inf", "nan"):
        with pytest.raises(UsageError, match=f"{name}='{value}' is not a number of seconds ≥ 0; give for example"):
            seconds_of({name: value}, name)
    assert ends(launcher.member("101", launcher.script(WORK), "5", **{name: "soon"})) == 2
    assert f"{name}='soon' is not a number of seconds ≥ 0" in launcher.err("101")


MEETING = """
    import os, socket, sys, threading, time
    import muri
    rank, path = int(os.environ["SLURM_PROCID"]), f"\\0{os.environ['MURI_RUN_DIR']}"
    peer = socket.socket(socket.AF_UNIX)
    if rank == 0:
        listener, peer = peer, None
        listener.bind(path)
        listener.listen()
        peer, _ = listener.accept()
    else:
        while peer.connect_ex(path):
            time.sleep(0.05)

    def meet():
        with muri.stage("synchronize"):
            peer.send(b"x")
            try:
                came = peer.recv(1)
            except ConnectionResetError:
                came = b""
            if not came:
                threading.Event().wait()  # the other rank was ended a moment before this one

    meet()
    end = time.monotonic() + 2
    while rank == 1 and time.monotonic() < end:
        sum(range(1000))  # the other rank waits for this one, and holds the network
    meet()
    print("met", flush=True)
    if rank == 1:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    meet()
"""
NETWORK = """
    import time
    import muri
    while True:
        with muri.stage("synchronize"):
            time.sleep(0.005)
"""


def test_a_rank_that_does_not_come_is_ended_unless_it_works_and_a_stopped_runtime_ends_the_group(
    launcher: Launcher,
) -> None:
    ranked = RankedLauncher(launcher, 2)
    ranked.start("101", "102", options=SOON)
    others = ranked.member("102", script=launcher.script(NETWORK, "network.py"), **AGAIN)
    meeting = ranked.member("101", script=launcher.script(MEETING, "meeting.py"))
    assert [ends(process) for process in meeting] == [-signal.SIGTERM] * 2, ranked.out("101", 0, "err")
    for rank in range(2):
        assert ranked.out("101", rank) == "met\n", ranked.out("101", rank, "err")
        assert "nothing of it has worked on any of its ranks" in ranked.out("101", rank, "err")
    assert [process.poll() for process in others] == [None, None]
    ranked.runtimes[1].send_signal(signal.SIGSTOP)
    assert ends(ranked.runtimes[0]) == 1
    assert "rank 0 ends, and its members go back to the queue: rank 1 has given no sign of life" in ranked.log(0)
    ranked.runtimes[1].kill()  # as srun does then
    assert [process.poll() for process in others] == [None, None]  # their gates are open until their job goes back


def watched(looks: list[tuple[float, ThreadSample]]) -> list[float]:
    """Return the idle times at an interval of 5 s for looks, each some seconds after the one before."""
    times_s = list(accumulate((step_s for step_s, _ in looks), initial=1000.0))
    timer = IdleTimer(5.0, iter(times_s[1:]).__next__)
    return [timer.idle_s(look) for _, look in looks]


def seen(states: str, cpu_s: float = 0.0) -> ThreadSample:
    return ThreadSample(frozenset(states), int(cpu_s * 1e9))


def test_only_time_that_was_watched_makes_something_look_still() -> None:
    assert watched([(5, seen("S"))] * 4) == [0, 5, 10, 15]
    assert watched([(5, seen("S")), (5, seen("S")), (86400, seen("S")), (5, seen("S"))]) == [0, 5, 15, 20]


def test_what_runs_or_waits_for_a_disk_or_is_debugged_or_uses_some_cpu_is_not_still() -> None:
    for states in ("R", "RS", "D", "DS", "t"):
        assert watched([(5, seen("S")), (5, seen("S")), (5, seen(states)), (5, seen("S"))]) == [0, 5, 0, 5]
    asks_a_dead_worker = [(5.0, seen("S", 0.0002 * i)) for i in range(181)]
    assert watched(asks_a_dead_worker)[-1] == 900
    loads_slowly = [(5.0, seen("S", 0.005 * i)) for i in range(181)]
    assert max(watched(loads_slowly)) <= 5
    ends_a_subprocess = [(5, seen("S", 9)), (5, seen("S", 9)), (5, seen("S", 4)), (5, seen("S", 4))]
    assert watched(ends_a_subprocess) == [0, 5, 0, 5]


def test_a_member_hangs_only_if_it_does_on_all_ranks_and_must_work_on_one() -> None:
    ranks, run = IdleReports(), ("101", "0.0.0#1")
    ranks.add(0, run, 150, must_work=True)
    ranks.add(1, run, 20, must_work=False)
    assert ranks.take_hung() == []
    ranks.add(1, run, 110, must_work=False)
    assert (ranks.take_hung(), ranks.take_hung()) == ([run], [])
    ranks.add(0, run, 150, must_work=False)
    ranks.add(1, run, 150, must_work=False)
    assert ranks.take_hung() == []
    ranks.add(1, run, 0, must_work=False)
    ranks.add(0, run, 150, must_work=True)
    ranks.left(1, run)
    assert ranks.take_hung() == [run]


def test_a_rank_that_reports_no_longer_is_not_called_still() -> None:
    ranks, run = IdleReports(), ("101", "0.0.0#1")
    ranks.add(1, run, 150, must_work=True)
    for spent in (0, 0, 0, 0, 0, 150):
        ranks.add(0, run, spent, must_work=True)
        assert ranks.take_hung() == []


@pytest.mark.parametrize("discipline", ["fair", "lockstep", "auto"])
def test_who_holds_what_others_wait_for_obstructs(discipline: str) -> None:
    clock = VirtualClock()
    arbiter = make_arbiter(discipline, ["a", "b"], ["a", "b"], {}, clock)
    for member in ("a", "b"):
        arbiter.join(member, 1.0)
    arbiter.acquire("a", 0)
    assert not arbiter.obstructs("a")
    waits = clock.start(arbiter.acquire, "b", 0)
    clock.settle()
    assert arbiter.obstructs("a")
    assert not arbiter.obstructs("b")
    arbiter.leave("a")
    clock.finish(waits)
    assert not arbiter.obstructs("a")


class Idle:
    """A session whose one thread, of this very process, does nothing until it is told to end."""

    hung = paused = False

    def __init__(self, member: str, **environment: str) -> None:
        self.member = member
        self.clock = StageClock()
        self.causes: list[str] = []
        self.request = SimpleNamespace(environment=environment)
        reading, self._end = os.pipe()
        self._thread = threading.Thread(target=os.read, args=(reading, 1), daemon=True)
        self._thread.start()
        call = Path(f"/proc/self/task/{self._thread.native_id}/syscall")  # "running", or its number and arguments
        until(lambda: call.read_text().split()[1:2] == [hex(reading)], "the thread to wait for the pipe")

    def working_threads(self) -> list[Path]:
        return [Path(f"/proc/self/task/{self._thread.native_id}")]

    def end_as_hung(self, cause: str) -> None:
        self.hung = True
        self.causes.append(cause)
        os.close(self._end)


class Watched:
    """Idle sessions that are watched for 100 s each, in virtual time."""

    def __init__(self, *sessions: Idle) -> None:
        self.clock = VirtualClock()
        self.arbiter = PausingArbiter(FairArbiter(self.clock), now=self.clock)
        self.watch = HangWatch(lambda: list(sessions), self.arbiter, 100.0, None, self.clock)
        for session in sessions:
            self.arbiter.join(session.member, 1.0)

    def waits(self, *asked: tuple[str, int]) -> list[threading.Thread]:
        """Let members wait for resources."""
        threads = [self.clock.start(self.arbiter.acquire, member, resource) for member, resource in asked]
        self.clock.settle()
        return threads

    def go_on(self, seconds: int) -> None:
        """Look every five seconds."""
        for _ in range(0, seconds, 5):
            assert self.watch.check() == 5.0
            self.clock.sleep(5.0)


def test_who_is_idle_and_obstructs_others_is_ended_after_the_timeout_and_not_before() -> None:
    holder, patient, waiting = sessions = Idle("1"), Idle("2", MURI_HANG_TIMEOUT_S="0"), Idle("3")
    group = Watched(*sessions)
    group.arbiter.acquire("1", 0)
    group.arbiter.acquire("2", 2)
    waits = group.waits(("3", 0), ("3", 2))
    group.go_on(100)
    assert not holder.hung
    group.watch.check()
    (cause,) = holder.causes
    assert "holds a resource for which other jobs wait" in cause
    assert "has worked for 100 s" in cause
    assert (patient.hung, waiting.hung) == (False, False)
    for member in "12":
        group.arbiter.leave(member)
    group.clock.finish(*waits)


def test_who_has_trained_must_not_be_idle_unless_it_waits_for_its_turn_or_slurm_has_suspended_it() -> None:
    stopped, queued, _new, suspended = sessions = [Idle(member) for member in "1235"]
    group = Watched(*sessions)
    for trained in (stopped, queued, suspended):
        trained.clock.iterations = 7
    suspended.paused = True
    group.arbiter.join("4", 1.0)
    group.arbiter.acquire("4", 0)  # a long validation of a member that works
    waits = group.waits(("2", 0))
    group.go_on(105)
    assert [session.hung for session in sessions] == [True, False, False, False]
    assert "has stopped in the middle of its training" in stopped.causes[0]
    group.arbiter.release("4", 0)
    group.clock.finish(*waits)
    group.go_on(105)
    assert [session.hung for session in sessions] == [True, True, False, False]


def test_a_script_whose_process_cannot_be_seen_from_here_is_not_called_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    unseen, waiting = sessions = Idle("1"), Idle("2")
    monkeypatch.setattr(unseen, "working_threads", list)
    group = Watched(*sessions)
    group.arbiter.acquire("1", 0)
    waits = group.waits(("2", 0))
    group.go_on(200)
    assert [session.hung for session in sessions] == [False, False]
    group.arbiter.leave("1")
    group.clock.finish(*waits)
    for session in (unseen, waiting):
        session.end_as_hung("the test is over")


def thread_at(place: Path, state: str, where: str, cpu_us: int, wakes: int) -> None:
    """Write what /proc tells of a thread."""
    place.mkdir(exist_ok=True)
    (place / "stat").write_text(f"7 (a (name)) {state} 1")
    (place / "schedstat").write_text(f"{cpu_us * 1000} 0 {wakes}")
    (place / "status").write_text(f"Name:\ta\nvoluntary_ctxt_switches:\t{wakes}\nnonvoluntary_ctxt_switches:\t9\n")
    (place / "wchan").write_text(where)


AT_LOCK = ("S", "futex_do_wait")


@pytest.mark.parametrize(
    ("looks", "works"),
    [
        ([(*AT_LOCK, 10500, 2000), ("R", "0", 20500, 3000)], False),  # it only asks for the lock all the time
        ([("S", "sk_wait_data", 10500, 2000)], True),  # a download
        ([(*AT_LOCK, 500_500, 2000)], True),  # a worker that gets work
        ([(*AT_LOCK, 550, 1001)], True),  # woken once
        ([("R", "0", 50_500, 1001)], True),  # computes
    ],
)
def test_who_only_asks_for_a_lock_does_no_work(
    tmp_path: Path, looks: list[tuple[str, str, int, int]], works: bool
) -> None:
    thread, meter = tmp_path / "7", ThreadMeter()
    thread_at(thread, *AT_LOCK, 500, 1000)
    assert meter.sample([thread]) == seen("S", 0.0005)
    for state, where, cpu_us, wakes in looks:
        thread_at(thread, state, where, cpu_us, wakes)
        found = ThreadSample(frozenset(state), cpu_us * 1000) if works else ThreadSample(frozenset(), 500_000)
        assert meter.sample([thread]) == found


def test_muris_own_looks_at_the_interpreters_lock_are_no_work_of_the_script() -> None:
    watch = LockWatch()
    until(lambda: watch._looks, "a look")
    assert ThreadMeter().sample([Path(f"/proc/self/task/{watch._thread.native_id}")]) == ThreadSample()
    watch.stop()


def test_a_process_counts_as_stopped_while_a_signal_stops_it() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        until(lambda: is_stopped(process.pid), "the stop")
        process.send_signal(signal.SIGCONT)
        until(lambda: not is_stopped(process.pid), "the continuation")
        process.kill()
    assert not is_stopped(process.pid)
