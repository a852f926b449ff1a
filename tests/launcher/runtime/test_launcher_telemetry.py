"""Rates, speeds and shares in the status file."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launcher_harness import Launcher, ends
from polling import until

from muri.group_spec import GroupSpec, MemberSpec
from muri.launcher.arbitration.disciplines import FairArbiter, LockstepArbiter
from muri.launcher.job.stage_clock import IterationRecord
from muri.launcher.runtime import member_table
from muri.launcher.runtime.member_table import MemberTable, SpeedMeter, group_status, shares_of, speed_of

LOOP = """
    import sys, time, muri
    for _ in muri.batches(range(int(sys.argv[1]))):
        with muri.stage("propagate"):
            time.sleep(0.05)
"""


def record(iteration_s: float, stage_s: tuple[float, ...], wait_s: tuple[float, ...] = (0, 0, 0, 0)) -> IterationRecord:
    return IterationRecord(iteration_s, stage_s, wait_s)


def test_rate_of_many_iterations_is_counted_over_the_window() -> None:
    meter = SpeedMeter()
    for second in range(100):
        meter.look(float(second), 10 * second if second < 60 else 600 + 2 * (second - 60))
    assert meter.per_s([record(99.0, (0, 0, 0, 0))]) == pytest.approx(2.0)


def test_rate_of_few_iterations_comes_from_their_lengths() -> None:
    meter = SpeedMeter()
    assert meter.per_s([]) is None
    meter.look(0.0, 0)
    meter.look(7.9, 1)
    assert meter.per_s([record(4.0, (0, 0, 0, 0))]) == pytest.approx(0.25)


def test_stalled_session_slows_down_although_no_iteration_ends() -> None:
    meter = SpeedMeter()
    records = [record(0.5, (0, 0, 0.5, 0))] * 4
    meter.look(0.0, 3)
    meter.look(1.0, 4)
    assert meter.per_s(records) == pytest.approx(2.0)
    meter.look(19.0, 4)
    assert meter.per_s(records) == pytest.approx(4 / 20)


def test_speed_is_iterations_times_solo_time_over_elapsed() -> None:
    records = [record(0.4, (0.1, 0, 0.1, 0), (0, 0, 0.2, 0))] * 3
    assert speed_of(2.5, records, 0.3) == pytest.approx(0.75)
    assert speed_of(2.5, records, None) == pytest.approx(0.5)  # its own time without waits stands in
    assert speed_of(None, records, 0.3) is None


seconds = st.floats(0, 10)
times = st.tuples(seconds, seconds, seconds, seconds)


@given(st.lists(st.tuples(times, times, seconds), min_size=1, max_size=5))
def test_shares_add_up_to_the_whole_iteration(parts: list) -> None:
    records = [record(sum(stage) + sum(wait) + rest, stage, wait) for stage, wait, rest in parts]
    shares = shares_of(records)
    if sum(one.iteration_s for one in records) > 1e-6:
        assert sum(shares.values()) == pytest.approx(1, abs=0.001)
        assert all(0 <= share <= 1.0001 for share in shares.values())


@pytest.mark.parametrize("arbiter", [FairArbiter(), LockstepArbiter(["101"])])
def test_holders_are_told_by_every_discipline(arbiter: FairArbiter | LockstepArbiter) -> None:
    arbiter.join("101")
    arbiter.acquire("101", 2)
    member = {"share": {"propagate": 0.7, "wait": 0.3}, "speed": 0.8}
    status = group_status(arbiter, {"101": member, "102": {"share": {"propagate": 0.5}, "speed": None}})
    assert status["resources"]["gpu"] == {"holder": "101", "busy": 1.0}
    assert status["resources"]["cpu"] == {"holder": None, "busy": 0.0}
    assert status["total_speed"] == 0.8
    arbiter.release("101", 2)
    assert group_status(arbiter, {})["resources"]["gpu"]["holder"] is None


def test_a_runtime_without_space_for_its_status_shows_that_it_lives(tmp_path: Path) -> None:
    table, path = MemberTable(GroupSpec((MemberSpec("1"),))), tmp_path / "status.json"
    table.watch(FairArbiter())
    path.write_text("{}")
    os.utime(path, (0, 0))
    with patch.object(member_table, "atomic_json", side_effect=OSError), pytest.raises(OSError):
        table.write_status(path)
    assert path.stat().st_mtime > 0


def test_status_file_tells_speed_against_the_plan(launcher: Launcher) -> None:
    options = ("--solo-iteration-s", "101=0.05", "--predicted-speed", "101=0.9,102=0.8", "--discipline", "fair")
    options = (*options, "--min-speed", "101=0.8")
    launcher.threads("101", "102", options=options)
    member = launcher.member("101", launcher.script(LOOP), 100_000)
    until(lambda: launcher.status()["members"]["101"]["iterations"] > 20, "20 iterations")
    until(lambda: launcher.status()["members"]["101"]["speed"], "a speed")
    status = launcher.status()
    running = status["members"]["101"]
    assert status["total_speed"] == running["speed"]
    assert running["speed"] == pytest.approx(running["iterations_per_s"] * 0.05)
    assert 0 < running["speed"] <= 1.05
    assert (running["predicted_speed"], running["solo_iteration_s"]) == (0.9, 0.05)
    assert (running["promised_speed"], status["members"]["102"]["promised_speed"]) == (0.8, None)
    assert running["script"].endswith("train.py")
    assert running["share"]["propagate"] > 0.5
    assert status["resources"]["gpu"]["busy"] == pytest.approx(running["share"]["propagate"], abs=1e-3)
    assert status["discipline"] == "fair"
    assert status["members"]["102"]["speed"] is None
    member.terminate()
    ends(member)
    until(lambda: launcher.status()["members"]["101"]["state"] == "ended", "its end")
    assert launcher.status()["members"]["101"]["speed"] is None
