"""Service of earlier runs: each counts once, and unseen ones come from the accounts."""

from dataclasses import replace

from at_work import behind_pilot, candidate, cycle_of
from fake_slurm import make_job, make_node

from muri.slurm_plugin.controller.history import PastRun, Service, gaps, noted, saved_gpu_s, served_gpu_s, with_accounts
from muri.slurm_plugin.records.cluster import JobState, Snapshot
from muri.slurm_plugin.records.journal import PREEMPT, Intent
from muri.slurm_plugin.records.roles import View, view_of
from muri.slurm_plugin.records.usage import Run


def view(**changes) -> View:
    job = replace(make_job(1, gpu_count=2, gpu_request="gres/gpu:2"), held=False, priority=1, **changes)
    return view_of(Snapshot(1000.0, "c", "26.05", (job,), (make_node("n1", gpu_count=2),)))


def stop(run: int, gpu_s: float, state: str = "done") -> Intent:
    return Intent(f"s{run}", PREEMPT, {"job_id": 1, "run": run, "why": "", "served_gpu_s": gpu_s}, state, None, 0.0)


def running(restart_count: int, start_s: float) -> View:
    return view(state=JobState.RUNNING, restart_count=restart_count, start_s=start_s, nodes="n1")


def waiting(restart_count: int, requeued_s: float) -> View:
    return view(restart_count=restart_count, submit_s=requeued_s)


def ended_run(elapsed_s: int, state: str = "REQUEUED") -> Run:
    return Run(1, "alice", "", "", state, 10, 100, 100 + elapsed_s, elapsed_s, 0)


def test_runs_that_slurm_ended_count_from_their_start_to_their_requeue():
    known = noted({}, running(0, 100.0))
    known = noted(known, waiting(1, 160.0))
    assert served_gpu_s(known, waiting(1, 160.0), ()) == {1: 120.0}
    again = running(1, 200.0)
    known = noted(known, again)
    assert served_gpu_s(known, again, ()) == {1: 120.0}  # what the present run has had is not in it
    known = noted(known, waiting(2, 230.0))
    assert served_gpu_s(known, waiting(2, 230.0), ()) == {1: 180.0}


def test_a_member_has_had_the_gpus_of_its_group():
    group = cycle_of(behind_pilot(1, candidate(2001), gpu_count=4), [make_node("n1", gpu_count=4)]).view
    (run,) = noted({}, group)[2001].runs
    assert (run.gpu_count, run.start_s) == (4, group.jobs[2001].start_s)


def test_a_run_that_muri_stopped_counts_once_and_only_then_is_saved():
    now = waiting(2, 300.0)
    known = {1: Service((PastRun(0, 100.0, 2, 160.0), PastRun(1, 200.0, 2, 300.0)))}
    stops = (stop(0, 118.0), stop(1, 5.0, "abandoned"))
    assert served_gpu_s(known, now, stops) == {1: 120.0 + 200.0}
    assert saved_gpu_s(now, stops) == {1: 118.0}


def test_a_stop_that_is_under_way_is_part_of_the_run_that_goes_on():
    assert served_gpu_s({}, running(0, 100.0), (stop(0, 50.0, "begun"),)) == {}
    assert saved_gpu_s(running(0, 100.0), (stop(0, 50.0, "begun"),)) == {1: 0.0}


def test_without_notes_muris_own_stops_still_count():
    assert served_gpu_s({}, waiting(1, 300.0), (stop(0, 50.0),)) == {1: 50.0}


def test_the_accounts_are_asked_once_about_runs_that_nobody_saw():
    now = waiting(3, 900.0)
    known = {1: Service((PastRun(2, 800.0, 2, 900.0),))}
    assert gaps(known, now, (stop(1, 10.0),)) == {1}  # run 0
    known = with_accounts(known, {1}, [ended_run(30), ended_run(5), ended_run(100), ended_run(7, "RUNNING")], now)
    assert gaps(known, now, ()) == frozenset()
    assert served_gpu_s(known, now, (stop(1, 10.0),)) == {1: 270.0}
    later = noted(noted(known, running(3, 1000.0)), waiting(4, 1010.0))
    assert gaps(later, waiting(4, 1010.0), ()) == frozenset()
    assert served_gpu_s(later, waiting(4, 1010.0), ()) == {1: 290.0}


def test_accounts_that_come_late_take_nothing_away():
    now = waiting(2, 300.0)
    known = with_accounts({1: Service((PastRun(1, 200.0, 2, 300.0),))}, {1}, [ended_run(30)], now)
    assert served_gpu_s(known, now, ()) == {1: 200.0}


def test_a_run_keeps_its_place_in_the_journal_and_an_ended_job_is_forgotten():
    known = noted({}, running(0, 100.0))
    assert {1: Service.of(known[1].fact)} == known
    assert noted(known, view(state=JobState.COMPLETED, start_s=100.0, end_s=200.0)) == {}


def test_a_record_that_speaks_of_billions_of_runs_costs_nothing():
    now = waiting(2**32 - 1, 300.0)
    known = noted({}, now)
    assert gaps(known, now, ()) == {1}
    asked = with_accounts(known, [1], [], now)
    assert gaps(asked, now, ()) == frozenset()
    assert served_gpu_s(asked, now, ()) == {}
