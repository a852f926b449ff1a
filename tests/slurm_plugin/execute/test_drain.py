"""`muri drain --wait`: a job that comes back held after the controller is gone goes on as a plain job."""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from fake_slurm import NOW_S, FakeSlurm, Killed, behind_license, four_jobs, group_at_work, make_job, one_cycle, one_gpu
from virtual_clock import VirtualClock

from muri.slurm_plugin.cli.admin import drain as drain_command
from muri.slurm_plugin.controller.loop import LOCK_NAME, AnotherControllerError, only_one
from muri.slurm_plugin.execute.gate import Drained, drain, drain_until_over
from muri.slurm_plugin.gateway.base import GatewayError, SlurmUnreachableError
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import JobState


@pytest.fixture
def at_work(make_controller) -> FakeSlurm:
    """Two members that run in a group on the only GPU."""
    slurm = group_at_work(make_controller, count=2)
    assert [slurm.jobs[n].state for n in (1, 2)] == [JobState.RUNNING] * 2
    assert slurm.jobs[1].gpu_count == 0
    return slurm


def watch(slurm: FakeSlurm, events: list[Callable[[], object]]) -> list[Drained]:
    """Drain until all is over; one event happens every 5 s, each between two passes."""
    clock = VirtualClock()

    def happen() -> None:
        for number, event in enumerate(events):
            clock.sleep(5.0 * number + 2.5 - clock())
            event()
            slurm.tick()

    thread = clock.start(happen)
    passes = list(drain_until_over(slurm, slurm.tagged, clock))
    assert clock() == 5.0 * len(events)
    clock.finish(thread)
    return passes


def pilot_of(slurm: FakeSlurm) -> int:
    return max(slurm.jobs)


def test_a_member_that_stops_after_the_drain_gets_its_gpu_back(at_work):
    slurm = at_work
    events = [lambda: slurm.requeue_hold(1), lambda: slurm.end(2), lambda: slurm.end(pilot_of(slurm))]
    passes = watch(slurm, events)
    assert passes[0].running == (1, 2)
    assert passes[1].restored == (1,)
    assert passes[-1].is_over
    assert (slurm.jobs[1].state, slurm.jobs[1].gpu_count, slurm.starts[1]) == (JobState.RUNNING, 1, 2)


def test_a_broken_group_and_a_job_still_being_saved_are_waited_for(at_work):
    slurm = at_work
    slurm.jobs[3] = make_job(3, state=JobState.COMPLETING, held=False, reason="", nodes="n1")

    def break_group() -> None:
        slurm.end(pilot_of(slurm), state=JobState.FAILED)
        for job_id in (1, 2):
            slurm.requeue_hold(job_id)

    def saved() -> None:
        slurm._update(3, state=JobState.PENDING, held=True, reason="job_requeued_in_held_state", restart_count=1)

    passes = watch(slurm, [break_group, lambda: None, saved, lambda: None])
    assert 3 in passes[0].leaving
    assert [done.restored for done in passes[:2]] == [(), (1, 2)]
    assert passes[3].released == (3,)
    assert not any(slurm.jobs[job_id].held for job_id in (1, 2, 3))


def test_a_silent_slurmctld_does_not_end_the_watch(at_work):
    slurm, snapshot = at_work, at_work.snapshot

    def fall_silent() -> None:
        slurm.snapshot = Mock(side_effect=SlurmUnreachableError("no answer"))

    def answer_again() -> None:
        slurm.snapshot = snapshot
        slurm.end(1)
        slurm.end(2)
        slurm.end(pilot_of(slurm))

    passes = watch(slurm, [fall_silent, answer_again])
    assert [done.is_over for done in passes] == [False, True]


@pytest.mark.parametrize(("held_s", "drained"), [(60.0, False), (3600.0, True)])
def test_the_watchdog_waits_for_no_controller_that_hangs(monkeypatch, tmp_path, held_s, drained):
    slurm = FakeSlurm([make_job(1)], one_gpu())
    monkeypatch.setattr("muri.slurm_plugin.gateway.commands.CommandGateway", lambda: slurm)
    config = tmp_path / "muri.yaml"
    config.write_text(f"state_dir: {tmp_path}\n")
    arguments = ["--config", str(config), "--if-stale", "1800"]
    with only_one(tmp_path):
        os.utime(tmp_path / LOCK_NAME, (time.time() - held_s,) * 2)
        if drained:
            assert "hangs" in CliRunner().invoke(drain_command, arguments, catch_exceptions=False).stderr
        else:
            with pytest.raises(AnotherControllerError):
                CliRunner().invoke(drain_command, arguments, catch_exceptions=False)
    assert slurm.jobs[1].held is not drained


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("nth", range(1, 10))
def test_a_drain_that_is_killed_is_finished_by_the_next(make_controller, side, nth):
    slurm = FakeSlurm(four_jobs()[:2], one_gpu())
    one_cycle(make_controller, slurm)
    slurm.jobs[3] = make_job(3)
    slurm.jobs[4] = make_job(4, state=JobState.RUNNING, held=False, nodes="n1", admin_comment="")  # the pilot must wait
    with contextlib.suppress(Killed), slurm.killing(side, nth):
        drain(slurm, slurm.snapshot)
    slurm.tick()
    drain(slurm, slurm.snapshot)
    assert not any(job.held for job in slurm.jobs.values())
    for _ in range(4):
        slurm.end(next(job.job_id for job in slurm.jobs.values() if job.state is JobState.RUNNING))
        slurm.tick()
    assert [slurm.jobs[n].gpu_count for n in (1, 2, 3)] == [1, 1, 1]
    assert slurm.starts == {1: 1, 2: 1, 3: 1}


def test_a_drain_ends_when_slurm_refuses_the_same_for_a_minute(monkeypatch):
    slurm = FakeSlurm([make_job(1), make_job(2)], one_gpu())
    release = slurm.release

    def refuse(job_id):
        if job_id == 1:
            raise GatewayError("cannot change job 1: Requested partition configuration not available now")
        release(job_id)

    monkeypatch.setattr(slurm, "release", refuse)
    clock = VirtualClock()
    passes = list(drain_until_over(slurm, slurm.tagged, clock))
    assert passes[0].released == (2,)
    assert not passes[-1].is_over
    assert "job 1: " in passes[-1].failed[0]
    assert 60 <= clock() <= 90


def test_a_lease_that_cannot_be_ended_is_told_as_are_the_jobs_that_it_keeps(monkeypatch):
    slurm = FakeSlurm([behind_license(make_job(number)) for number in (1, 2)], one_gpu(), gate_license=True)
    slurm.extend_lease(NOW_S + 600)
    modify = slurm._modify

    def refuse(job_id=2, change=None):
        if job_id == 2:
            raise GatewayError("Access/permission denied")
        modify(job_id, change)

    monkeypatch.setattr(slurm, "_modify", refuse)
    monkeypatch.setattr(slurm, "end_lease", refuse)
    drained = drain(slurm, slurm.tagged)
    assert drained.released == (1,)
    assert [why.partition(":")[0] for why in drained.failed] == ["the reservation muri_gate", "job 2"]


def test_a_job_that_its_user_holds_gets_its_own_request_back_and_stays_held():
    given = tags.format_record(tags.Given(int(NOW_S) - 10, tags.Original("gres/gpu:1", "", 4, 4, 0, 3600)))
    job = make_job(1, cpu_count=12, cpus_per_task=12, required_nodes="n1",
                   admin_comment=f"muri:alone=1 {tags.GIVEN_PREFIX}{given}")  # fmt: skip
    held = replace(behind_license(job), held=True, reason="JobHeldUser", priority=0)
    slurm = FakeSlurm([held], one_gpu(), gate_license=True)
    assert drain(slurm, slurm.tagged).restored == (1,)
    left = slurm.jobs[1]
    assert (left.cpu_count, left.required_nodes, left.held) == (4, "", True)
