"""How long a member waits for its group's runtime, and a job without a grant for its scheduler: real sockets, virtual
time.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launcher_harness import short_folder
from virtual_clock import VirtualClock

from muri.errors import MuriError
from muri.group_spec import MemberSpec, Place
from muri.launcher import protocol
from muri.launcher.job.scheduler import MembershipError
from muri.launcher.run.client import NoTurnsError, RuntimeLostError, require_no_group, wait_for_runtime


class Scheduler:
    """Says nothing for the first questions; then whether the job is in a group, and whether the pilot job runs."""

    def __init__(self, place: Place | None = None, silent: int = 0, *, runs: bool = True) -> None:
        self.asked = 0
        self._place, self._silent, self._runs = place, silent, runs

    def await_place(self, job_id: str) -> Place | None:
        self._answer()
        return self._place

    def runs(self, job_id: str) -> bool:
        assert job_id == "900"
        self._answer()
        return self._runs

    def _answer(self) -> None:
        self.asked += 1
        if self.asked <= self._silent:
            raise MembershipError("no answer")


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


def wait(run_dir: Path, scheduler: Scheduler, clock: VirtualClock, **variables: str) -> socket.socket:
    return wait_for_runtime({"MURI_RUN_DIR": str(run_dir)} | variables, "900", lambda: scheduler, clock)


@pytest.mark.parametrize(
    ("name", "variables", "comes_s", "found_s", "asked"),
    [
        ("pilot-900.sock", {}, 7.6, 7.75, 0),
        ("pilot-900.sock", {}, 100.1, 100.25, 4),
        ("pilot-900.r3.sock", {"RANK": "3", "WORLD_SIZE": "4"}, 7.6, 7.75, 0),
    ],
)
def test_a_runtime_that_comes_in_time_is_found_and_slurm_is_rarely_asked(
    run_dir: Path, name: str, variables: dict[str, str], comes_s: float, found_s: float, asked: int
) -> None:
    clock, scheduler = VirtualClock(), Scheduler(silent=2)
    with runtime_that_comes(clock, run_dir / name, comes_s):
        wait(run_dir, scheduler, clock, **variables).close()
    assert (clock(), scheduler.asked) == (found_s, asked)


@pytest.mark.parametrize(("variables", "after_s"), [({}, 120.0), ({"MURI_ATTACH_TIMEOUT_S": "5"}, 5.0)])
def test_wait_for_a_runtime_has_an_end(run_dir: Path, variables: dict[str, str], after_s: float) -> None:
    clock = VirtualClock()
    with pytest.raises(RuntimeLostError, match=f"pilot job 900 did not come within {after_s:g} s"):
        wait(run_dir, Scheduler(), clock, **variables)
    assert clock() == after_s


def test_a_member_does_not_wait_for_a_pilot_job_that_has_ended(run_dir: Path) -> None:
    clock = VirtualClock()
    with pytest.raises(RuntimeLostError, match="pilot job 900, which was to hold the job's GPUs, has ended"):
        wait(run_dir, Scheduler(runs=False), clock)
    assert clock() == 10.0


@pytest.mark.parametrize("silent", [0, 10_000], ids=["Slurm answers", "a container without Slurm's commands"])
def test_a_member_that_sees_no_run_dir_has_no_way_to_its_runtime(run_dir: Path, silent: int) -> None:
    clock = VirtualClock()
    with pytest.raises(NoTurnsError, match=f"there is no {run_dir}/absent here, as in a container"):
        wait(run_dir / "absent", Scheduler(silent=silent), clock)
    assert clock() == 10.0


def of_others(run_dir: Path, _listener: socket.socket) -> None:
    run_dir.chmod(0o755)


def runtime_of_others(run_dir: Path, listener: socket.socket) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can listen as another user")
    listener.bind(str(protocol.pilot_socket(run_dir, "900")))
    os.seteuid(4711)
    try:
        listener.listen()
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    ("put_up", "why"), [(of_others, "mode 0755"), (runtime_of_others, "belongs to user id 4711, not to 0")]
)
def test_what_others_may_have_put_up_loses_the_runtime_at_once(
    run_dir: Path, put_up: Callable[[Path, socket.socket], None], why: str
) -> None:
    clock = VirtualClock()
    with socket.socket(socket.AF_UNIX) as listener:
        put_up(run_dir, listener)
        with pytest.raises(RuntimeLostError, match=f"pilot job 900 cannot be trusted: .* {why}"):
            wait(run_dir, Scheduler(), clock)
        assert clock() == 0.0


def test_a_job_in_no_group_runs_alone() -> None:
    require_no_group("101", Scheduler())


@pytest.mark.parametrize(
    ("pilot", "named"), [("900", "the group of pilot job 900, whose GPUs"), ("", "the group, whos")]
)
def test_a_member_without_a_grant_does_not_run_here(pilot: str, named: str) -> None:
    with pytest.raises(RuntimeLostError, match=f"job 101 is in {named}"):
        require_no_group("101", Scheduler(Place(pilot, MemberSpec("101"))))


def test_a_job_of_which_nothing_is_known_does_not_run_here() -> None:
    with pytest.raises(RuntimeLostError, match="not known whether job 101 is in a group: no answer") as caught:
        require_no_group("101", Scheduler(silent=1))
    assert isinstance(caught.value.__cause__, MuriError)
