"""How long a member waits for its group's runtime, and for what: real sockets, virtual time."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launcher_harness import short_folder
from virtual_clock import VirtualClock

from muri.group_spec import MemberSpec, Place
from muri.launcher import protocol
from muri.launcher.job.scheduler import Membership, MembershipError
from muri.launcher.run.client import RuntimeLostError, wait_for_runtime


class Scheduler(Membership):
    """Says nothing for the first questions, then whether the job is in a group, and of which pilot job."""

    def __init__(self, expected: bool, pilot: str = "", silent: int = 0) -> None:
        self.asked = 0
        self._expected, self._pilot, self._silent = expected, pilot, silent

    def await_place(self, job_id: str) -> Place | None:
        self.asked += 1
        if self.asked <= self._silent:
            raise MembershipError("no answer")
        return Place(self._pilot, MemberSpec(job_id)) if self._expected else None


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with short_folder() as folder:
        yield Path(folder)


@contextlib.contextmanager
def runtime_that_comes(clock: VirtualClock, path: Path, at_s: float) -> Iterator[None]:
    """A runtime that begins to listen at a time."""
    listener = socket.socket(socket.AF_UNIX)

    def listen() -> None:
        clock.sleep(at_s)
        listener.bind(str(path))
        listener.listen()

    clock.start(listen)
    with listener:
        yield


def wait(run_dir: Path, scheduler: Scheduler, clock: VirtualClock, **variables: str) -> socket.socket | None:
    return wait_for_runtime({"MURI_RUN_DIR": str(run_dir)} | variables, "101", scheduler, clock)


@pytest.mark.parametrize(
    ("pilot", "name", "silent", "comes_s", "found_s"),
    [
        ("", "job-101.sock", 0, 100.1, 100.25),
        ("900", "pilot-900.sock", 3, 7.6, 7.75),
        pytest.param("900", "host-900.sock", 3, 7.6, 7.75, id="0.2"),
    ],
)
def test_runtime_that_comes_in_time_is_found_by_its_member_or_its_pilot_job(
    run_dir: Path, pilot: str, name: str, silent: int, comes_s: float, found_s: float
) -> None:
    clock, scheduler = VirtualClock(), Scheduler(expected=True, pilot=pilot, silent=silent)
    path = run_dir / name
    with runtime_that_comes(clock, path, comes_s):
        connection = wait(run_dir, scheduler, clock)
        assert connection is not None
        connection.close()
    assert (clock(), scheduler.asked) == (found_s, silent + 1)


def test_after_a_requeue_the_jobs_own_name_may_lead_to_a_group_that_it_has_left(run_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left, socket.socket(socket.AF_UNIX) as new:
        for listener, path in (
            (left, protocol.member_socket(run_dir, "101")),
            (new, protocol.pilot_socket(run_dir, "900")),
        ):
            listener.bind(str(path))
            listener.listen()
        run_2 = {"SLURM_RESTART_COUNT": "1"}
        assert wait(run_dir, Scheduler(expected=False), VirtualClock(), **run_2) is None
        connection = wait(run_dir, Scheduler(expected=True, pilot="900"), VirtualClock(), **run_2)
        assert connection is not None
        assert connection.getpeername() == new.getsockname()
        connection.close()


@pytest.mark.parametrize(("variables", "after_s"), [({}, 120.0), ({"MURI_ATTACH_TIMEOUT_S": "5"}, 5.0)])
@pytest.mark.parametrize("scheduler", [Scheduler(expected=True), Scheduler(expected=False, silent=10_000)])
def test_wait_for_a_runtime_has_an_end(
    run_dir: Path, scheduler: Scheduler, variables: dict[str, str], after_s: float
) -> None:
    clock = VirtualClock()
    with pytest.raises(RuntimeLostError, match=f"job 101 did not come within {after_s:g} s"):
        wait(run_dir, scheduler, clock, **variables)
    assert clock() == after_s


def test_a_member_does_not_wait_for_a_pilot_job_that_has_ended(run_dir: Path) -> None:
    clock = VirtualClock()
    with pytest.raises(RuntimeLostError, match="pilot job 900, which was to hold the job's GPUs, has ended"):
        wait(run_dir, Scheduler(expected=True, pilot="900"), clock)
    assert clock() == 10.0


def test_job_in_no_group_runs_alone_as_soon_as_that_is_known(run_dir: Path) -> None:
    clock = VirtualClock()
    assert wait(run_dir, Scheduler(expected=False, silent=12), clock) is None
    assert clock() == 3.0


def of_others(run_dir: Path, _listener: socket.socket) -> None:
    run_dir.chmod(0o755)


def runtime_of_others(run_dir: Path, listener: socket.socket) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can listen as another user")
    listener.bind(str(protocol.member_socket(run_dir, "101")))
    os.seteuid(4711)
    try:
        listener.listen()
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    ("put_up", "why"), [(of_others, "mode 0755"), (runtime_of_others, "belongs to user id 4711, not to 0")]
)
def test_what_others_may_have_put_up_loses_the_runtime_as_soon_as_the_job_is_known_to_be_a_member(
    run_dir: Path, put_up: Callable[[Path, socket.socket], None], why: str
) -> None:
    clock = VirtualClock()
    with socket.socket(socket.AF_UNIX) as listener:
        put_up(run_dir, listener)
        with pytest.raises(RuntimeLostError, match=f"job 101 cannot be trusted: .* {why}"):
            wait(run_dir, Scheduler(expected=True, silent=12), clock)
        assert clock() == 3.0
        assert wait(run_dir, Scheduler(expected=False, silent=12), clock) is None
