"""Events: what rings the bell (a file that slurmctld writes, a count that it tells), and how soon a cycle follows."""

import os
import stat
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
from stand_in_controller import Happenings
from virtual_clock import VirtualClock

from muri.slurm_plugin.controller import events
from muri.slurm_plugin.controller.events import (
    ArrivalWatch,
    Bell,
    EndWatch,
    ended_in,
    make_notice_file,
    slurm_user,
    slurmctld_hosts,
)
from muri.slurm_plugin.controller.status import JobStatus, Status, write_status
from muri.slurm_plugin.gateway.accounting import slurm_settings
from muri.slurm_plugin.gateway.base import SlurmUnreachableError
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.private_files import UnsafeFileError

SDIAG = """\
*******************************************************
Jobs submitted: 40
Jobs started:   30
Jobs completed: 20
Jobs canceled:  4
Jobs failed:    2

Job states ts:  Wed Nov 25 21:43:05 2026 (1795642985)
Jobs pending:   3
Jobs running:   1

Remote Procedure Call statistics by message type
	REQUEST_COMPLETE_BATCH_SCRIPT           ( 5018) count:7      ave_time:364    total_time:2551
	MESSAGE_EPILOG_COMPLETE                 ( 6012) count:{}     ave_time:68     total_time:476

Remote Procedure Call statistics by user
	root            (       0) count:99     ave_time:147    total_time:14631
"""


class Told:
    """Slurm's commands, whose answers a test sets."""

    def __init__(self) -> None:
        self.cleaned_up = 10
        self.up = True
        self.asked: list[str] = []

    def run(self, action: str, arguments: list[str]) -> str:
        self.asked.append(arguments[0])
        if not self.up:
            raise SlurmUnreachableError("slurmctld does not answer")
        if arguments[0] == "sdiag":
            return SDIAG.format(self.cleaned_up)
        return (
            f"SlurmUser               = slurm({os.geteuid()})\nSlurmctldHost[0]        = head(10.0.0.1)\n"
            "SlurmctldHost[1]        = spare.example.org\n"
        )


@pytest.fixture
def told() -> Told:
    return Told()


def commands(told: Told) -> SlurmCommands:
    return cast(SlurmCommands, told)


def test_slurm_names_its_user_and_its_hosts(told: Told) -> None:
    settings = slurm_settings(commands(told))
    assert slurm_user(settings) == os.geteuid()
    assert slurmctld_hosts(settings) == ("head", "spare")


def test_the_notice_file_is_slurms_alone_and_holds_a_byte(tmp_path: Path) -> None:
    path = tmp_path / "run" / "notice"
    make_notice_file(path, 4711)
    facts = path.lstat()
    assert (stat.S_IMODE(facts.st_mode), facts.st_size, facts.st_uid) == (0o660, 1, os.geteuid())


def test_the_notice_file_replaces_a_link_and_lies_where_nobody_else_writes(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    path = tmp_path / "notice"
    path.symlink_to(target)
    make_notice_file(path, os.geteuid())
    assert (target.read_text(), path.is_symlink()) == ("precious", False)
    tmp_path.chmod(0o777)
    with pytest.raises(UnsafeFileError, match="not a place for the notice file"):
        make_notice_file(path, os.geteuid())


def write(path: Path, at_ns: int) -> None:
    """Write as job_submit does, at a time of the test's."""
    with path.open("r+") as file:
        file.write("1")
    os.utime(path, ns=(at_ns, at_ns))


def test_an_arrival_is_seen_once(told: Told, tmp_path: Path) -> None:
    path = tmp_path / "notice"
    watch = ArrivalWatch(path, commands(told), VirtualClock())
    assert not watch.look()
    assert path.exists()
    assert not watch.look()
    write(path, 5)
    assert (watch.look(), watch.look()) == (True, False)
    write(path, 6)
    assert (watch.mark(), watch.look()) == (True, False)


def test_a_notice_file_that_was_removed_is_made_again_but_not_at_every_look(told: Told, tmp_path: Path) -> None:
    clock = VirtualClock()
    path = tmp_path / "notice"
    told.up = False
    watch = ArrivalWatch(path, commands(told), clock)
    for _ in range(59):
        assert not watch.look()
        clock.sleep(1.0)
    assert len(told.asked) == 1
    told.up = True
    clock.sleep(1.0)
    assert not watch.look()
    assert path.exists()


def test_a_notice_file_that_is_a_link_rings_nothing(told: Told, tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "notice"
    target.touch()
    path.symlink_to(target)
    clock = VirtualClock()
    watch = ArrivalWatch(path, commands(told), clock)
    os.utime(target, ns=(5, 5))
    assert not watch.look()
    assert not path.is_symlink()  # and has been made anew


def status(path: Path, slurm_state: str, at_ns: int) -> None:
    job = JobStatus(7, "alice", "train", "resnet18", "waiting", slurm_state)
    write_status(path, Status(1.0, "muri-s", "commands", (job,), ()))
    os.utime(path, ns=(at_ns, at_ns))


def test_ends_are_asked_for_only_while_jobs_wait_and_only_so_often(told: Told, tmp_path: Path) -> None:
    clock, file = VirtualClock(), tmp_path / "status.json"
    watch = EndWatch(file, commands(told), clock)
    for at_ns, state in enumerate(("", "RUNNING", "PENDING")):
        if state:
            status(file, state, at_ns)
        for _ in range(10):
            assert not watch.look()
            clock.sleep(1.0)
    assert told.asked == ["sdiag"] * 2


def test_an_end_after_the_cycle_began_is_seen_once(told: Told, tmp_path: Path) -> None:
    clock, file = VirtualClock(), tmp_path / "status.json"
    status(file, "PENDING", 1)
    watch = EndWatch(file, commands(told), clock)
    told.cleaned_up += 1
    assert not watch.mark()
    told.cleaned_up += 1
    assert not watch.look()
    clock.sleep(5.0)
    assert (watch.look(), watch.look()) == (True, False)
    clock.sleep(5.0)
    told.up = False
    assert not watch.look()
    clock.sleep(5.0)
    told.up, told.cleaned_up = True, 0  # slurmctld counts anew each day
    assert watch.look()


def test_an_answer_without_counts_tells_nothing() -> None:
    assert ended_in(SDIAG.format(10)) == 17
    assert ended_in(SDIAG.replace("COMPLETE", "OTHER")) == 0  # none yet
    assert ended_in("") is None


def begun(at_s: list[float], lasting_s: float = 0.5, until_s: float = 60.0) -> list[float]:
    """When cycles begin that take so long, looked for each half second."""
    clock = VirtualClock()
    bell = Bell((Happenings(clock, at_s),), clock)
    found = []
    while clock() < until_s:
        bell.look()
        if bell.due_s <= clock():
            found.append(clock())
            with bell.cycle():
                clock.sleep(lasting_s)
        clock.sleep(0.5)
    return found


@pytest.mark.parametrize(
    ("at_s", "begun_s"),
    [
        pytest.param([10.0], [11.0], id="an event is served once and soon"),
        pytest.param([10.0, 11.2], [11.0, 16.5], id="an event during a cycle is served by the next one"),
        pytest.param(
            [10 + number / 100 for number in range(100)], [11.0, 16.5],
            id="a burst shares a cycle, and its last jobs get one more",
        ),
    ],
)  # fmt: skip
def test_events_are_served(at_s: list[float], begun_s: list[float]) -> None:
    assert begun(at_s) == begun_s


@pytest.mark.parametrize(("most_share", "gap_s"), [(0.2, 40.0), (0.5, 10.0), (1.0, 5.0)])
def test_long_cycles_take_no_more_than_their_share(
    monkeypatch: pytest.MonkeyPatch, most_share: float, gap_s: float
) -> None:
    monkeypatch.setattr(events, "MOST_SHARE", most_share)
    times_s = begun([number / 10 for number in range(6000)], 10.0, 600.0)
    assert {later - earlier for earlier, later in pairwise(times_s)} == {10.0 + gap_s}


def test_a_cycle_that_could_not_begin_is_left_to_the_timer() -> None:
    clock = VirtualClock()
    bell = Bell((), clock)
    bell.ring()
    bell.give_up()
    assert bell.due_s == float("inf")
    bell.ring()
    assert bell.due_s == 5.0
