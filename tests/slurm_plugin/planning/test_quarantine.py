"""A fault costs one job: whatever a job, an intent or a profile does to a decision, the others' cycle goes on."""

from dataclasses import replace

import pytest
from at_work import candidate
from fake_slurm import FOUR_KINDS, FakeSlurm, behind_license, group_at_work, make_node, pilots

from muri.slurm_plugin.planning import decision as decision_module
from muri.slurm_plugin.records.cluster import JobState, Unreadable
from muri.slurm_plugin.records.journal import GPU_MEM
from muri.slurm_plugin.records.roles import Role


def queue(count: int, hostile: set[int]) -> FakeSlurm:
    """Jobs of alice's, the hostile ones bob's."""
    owners = {True: {"user": "bob", "uid": 1002}, False: {}}
    jobs = [candidate(n, f"m{n % 4 + 1}", **owners[n in hostile]) for n in range(1, count + 1)]
    return FakeSlurm(
        [*map(behind_license, jobs)], [make_node(f"n{n}", gpu_count=4) for n in range(1, 4)], gate_license=True
    )


@pytest.fixture
def poison(monkeypatch):
    """Make some step of a decision fail on some jobs."""

    def spread(step: str, hostile: set[int]) -> list[int]:
        real, calls = getattr(decision_module, step), []

        def poisoned(cycle, *rest, **named):
            calls.append(1)
            if any(job.job_id in hostile and job.role is not Role.OTHER for job in cycle.view.jobs.values()):
                raise ZeroDivisionError("float division by zero")
            return real(cycle, *rest, **named)

        monkeypatch.setattr(decision_module, step, poisoned)
        return calls

    return spread


@pytest.mark.parametrize("step", ["reconcile", "prepare"])
@pytest.mark.parametrize("hostile", [{5}, {1, 20}, set(range(1, 21, 2))])
def test_a_job_that_breaks_a_step_is_left_to_slurm_and_the_others_start(make_controller, poison, step, hostile):
    slurm = queue(20, hostile)
    poison(step, hostile)
    with make_controller(slurm) as controller:
        status = controller.cycle()
    slurm.tick()
    started = {n for n in range(1, 21) if "muri_gate" not in slurm.jobs[n].licenses}
    assert hostile <= started
    assert len(started - hostile) >= min(10, 20 - len(hostile))
    told = {job.job_id: job.reasons for job in status.jobs}
    for job_id in hostile & set(told):
        assert any("Muri failed on" in why for why in told[job_id])
    assert any("ZeroDivisionError" in error for error in status.errors)


def test_a_thousand_faulty_jobs_of_one_user_cost_few_decisions(make_controller, poison):
    hostile = set(range(1, 1001))
    slurm = queue(1010, hostile)
    calls = poison("reconcile", hostile)
    with make_controller(slurm) as controller:
        decision = controller.decision()
    assert set(decision.quarantine.jobs) == hostile
    (line,) = decision.quarantine.faults(decision.view)
    assert line.endswith("(one of 1000 faulty jobs of bob)")
    assert len(calls) < 60


def test_many_unreadable_jobs_are_told_in_few_lines(make_controller, monkeypatch):
    slurm, odd = queue(1, set()), tuple(Unreadable(n, "its time is odd") for n in range(100))
    real = slurm.snapshot
    monkeypatch.setattr(slurm, "snapshot", lambda: replace(real(), unreadable=odd))
    with make_controller(slurm) as controller:
        assert len(controller.cycle().errors) == 6


def test_a_profile_that_breaks_the_plan_costs_its_own_jobs_at_most(make_controller, monkeypatch):
    slurm = queue(8, set())
    bad = FOUR_KINDS[0].key
    real = decision_module.prepare

    def prepare(cycle, use, **rest):
        if bad in cycle.knowledge.profiles:
            raise OverflowError("too large")
        return real(cycle, use, **rest)

    monkeypatch.setattr(decision_module, "prepare", prepare)
    with make_controller(slurm, profiling={"at_once": 0}, tuning={"wait_for_profiles_s": 0}) as controller:
        decision = controller.decision()
    assert list(decision.quarantine.blamed) == [bad]
    assert len(decision.plan.groups) + len(decision.plan.solo) > 1


def test_an_intent_that_cannot_be_read_is_abandoned(make_controller):
    slurm = queue(2, set())
    with make_controller(slurm) as controller:
        controller._journal.begin("f00d", "group", {"members": "nonsense"}, slurm.now_s)
        controller._journal.begin("beef", "dry-run", {"job_id": 1, "key": {"odd": 1}}, slurm.now_s)
        controller._journal.set_fact("bar", "no number", "why")
        controller._journal.set_fact("dry-run-failed", "key", 5)
        controller._journal.set_fact(GPU_MEM, "1", "not a number")
        controller.cycle()
        assert controller._journal.intents("begun") == ()
    slurm.tick()
    assert all(slurm.jobs[n].state is JobState.RUNNING for n in (1, 2))


def test_a_fault_that_is_nobodys_is_raised(make_controller, monkeypatch):
    def reconcile(cycle):
        raise RuntimeError("broken")

    monkeypatch.setattr(decision_module, "reconcile", reconcile)
    with make_controller(queue(3, set())) as controller, pytest.raises(RuntimeError, match="broken"):
        controller.cycle()


def test_a_pilot_at_fault_still_counts_as_running(make_controller, monkeypatch):
    slurm = group_at_work(make_controller)
    with make_controller(slurm) as controller:
        (pilot,) = pilots(slurm)
        real = decision_module.reconcile

        def reconcile(cycle):
            if cycle.view.jobs[pilot.job_id].role is Role.PILOT:
                raise ValueError("odd comment")
            return real(cycle)

        monkeypatch.setattr(decision_module, "reconcile", reconcile)
        slurm.calls.clear()
        slurm.now_s += 3600
        controller.cycle()
    assert "cancel" not in slurm.calls
    assert all(slurm.jobs[n].state is JobState.RUNNING for n in (1, 2, 3, 4))
