"""SJF-BSBF in the controller's cycle: who starts so that others can join, who joins which, with which sub-batch."""

from dataclasses import asdict, replace

import pytest
from at_work import measured_pair
from fake_slurm import FakeSlurm, Killed, make_job, make_node, one_cycle, pilots

from muri.policies.types import NodeShare, Plan, PlanRequest, Policy, Reason, Running, Sharer, Waiting
from muri.profiler.interference import FITS, LinearFit, computation_name
from muri.profiler.records import Document, ProfileKey, StageProfile
from muri.profiler.slowdown import SLOWDOWNS, Parabola, SlowdownFit
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import StartGroup, started
from muri.slurm_plugin.planning.cycle_input import CycleInput, Knowledge
from muri.slurm_plugin.planning.decision import decide
from muri.slurm_plugin.planning.model_traits import KnownTraits, batch_model, interference_table
from muri.slurm_plugin.profile_use import read_traits
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.roles import Role, read_job, view_of

POLICY = {"policy": "sjf-bsbf", "gpu_mem_gib": {"gpu": 10.0}, "grouping": {"min_speed": 0.4}}


def profile(
    model: str, batch_size: int, iteration_s: float, gpu_mem_gib: float, preprocess: float = 0.1
) -> StageProfile:
    shares = (0.0, preprocess, 1 - preprocess, 0.0)
    key = ProfileKey(model, batch_size, 1, "gpu")
    stages = [share * iteration_s for share in shares]
    return StageProfile(key, *stages, iteration_s=iteration_s, iterations=20, gpu_mem_gib=gpu_mem_gib)


KNOWN = (
    profile("long", 8, 1.0, 6.0, preprocess=0.7),
    profile("short", 8, 0.5, 8.0),
    profile("short", 4, 0.3, 5.0),  # 2 GiB and 0.75 GiB per sample: 5 GiB in 2 parts, 3.5 GiB in 4
)


def job(job_id: int, model: str, duration_s: int, accumulate: int = 1, **changes):
    mark = f"muri:model={model},batch-size=8,duration={duration_s}"
    return make_job(job_id, admin_comment=mark + (f",accumulate={accumulate}" if accumulate > 1 else ""), **changes)


def run_alone(make_controller, node_gpus: int = 1, known=None, **changes) -> FakeSlurm:
    slurm = FakeSlurm([job(1, "long", 10_000, **changes)], [make_node("n1", gpu_count=node_gpus)])
    cycle(slurm, make_controller, known or KNOWN)
    slurm.tick()
    slurm.tick()
    assert slurm.jobs[1].state is JobState.RUNNING
    return slurm


def cycle(slurm: FakeSlurm, make_controller, known=KNOWN, **changes):
    return one_cycle(make_controller, slurm, known, **{**POLICY, **changes})


def test_a_short_job_joins_a_long_one_with_as_small_a_batch_as_the_memory_asks(make_controller):
    slurm = run_alone(make_controller)
    (pilot,) = pilots(slurm)
    first = tags.parse_state(slurm.jobs[1].admin_comment)
    assert (first.pilot, first.accumulate_steps) == (pilot.job_id, 1)
    slurm.jobs[2] = job(2, "short", 100, accumulate=8)
    status = cycle(slurm, make_controller)
    slurm.tick()
    joined = tags.parse_state(slurm.jobs[2].admin_comment)
    assert (joined.pilot, joined.accumulate_steps) == (pilot.job_id, 4)  # 6 + 3.5 GiB fit into 10, 6 + 5 do not
    assert slurm.jobs[2].state is JobState.RUNNING
    assert status[2].partners == (1,)
    assert any("4 steps" in reason for reason in status[2].reasons)
    assert not any("4 steps" in reason for reason in status[1].reasons)
    assert 0 < status[2].predicted_speed < 1
    assert pilots(slurm) == [slurm.jobs[pilot.job_id]]
    slurm.jobs[3] = job(3, "short", 200, accumulate=8)
    before = dict(slurm.jobs)
    cycle(slurm, make_controller)
    assert slurm.jobs == before  # both are kept as they are, and a third waits
    policy = Scripted()
    decided(slurm, policy)
    units = {unit.members[0].job_id: unit for unit in policy.request.running}
    assert [(units[each].accumulate_steps, units[each].gpus[0].gpu_ids) for each in (1, 2)] == [(1, (0,)), (4, (0,))]


TWO_GPUS = {"gpu_count": 2, "gpu_request": "gres/gpu:2", "cpu_count": 4}
ON_TWO = tuple(
    replace(each, key=replace(each.key, gpu_count=2)) for each in (KNOWN[0], replace(KNOWN[1], gpu_mem_gib=3.0))
)


@pytest.mark.parametrize(("tasks", "joins"), [(2, True), (1, False)])
def test_a_job_on_two_gpus_joins_one_on_the_same_two_if_it_has_a_rank_for_each(make_controller, tasks, joins):
    known = (*KNOWN, *ON_TWO)
    slurm = run_alone(make_controller, 2, known, cpus_per_task=2, **TWO_GPUS)
    (pilot,) = pilots(slurm)
    assert pilot.gpu_count == 2
    slurm.jobs[2] = job(2, "short", 100, cpus_per_task=4 // tasks, **TWO_GPUS)
    status = cycle(slurm, make_controller, known)
    slurm.tick()
    assert (slurm.jobs[2].state is JobState.RUNNING) == joins
    assert status[2].partners == ((1,) if joins else ())
    assert joins or any("has a task for each" in reason for reason in status[2].reasons)
    # A job on one GPU joins no part of two.
    slurm.jobs[3] = job(3, "short", 100)
    cycle(slurm, make_controller, known)
    assert read_job(slurm.jobs[3]).role is Role.CANDIDATE


@pytest.mark.parametrize("changes", [{"uid": 1002, "user": "bob"}, {"cpu_count": 28}, {"accumulate": 1}])
def test_who_cannot_join_or_split_its_batch_waits_and_starts_when_the_gpu_is_free(make_controller, changes):
    slurm = run_alone(make_controller)
    slurm.jobs[2] = job(2, "short", 100, **{"accumulate": 8, **changes})
    status = cycle(slurm, make_controller)
    assert read_job(slurm.jobs[2]).role is Role.CANDIDATE
    assert status[2].reasons
    slurm.end(1)
    slurm.end(pilots(slurm)[0].job_id)
    cycle(slurm, make_controller)
    slurm.tick()
    assert slurm.jobs[2].state is JobState.RUNNING


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_killed_at_any_call_the_sub_batch_is_carried_on(make_controller, side, nth):
    slurm = run_alone(make_controller)
    slurm.jobs[2] = job(2, "short", 100, accumulate=8)
    with pytest.raises(Killed), slurm.killing(side, nth):
        cycle(slurm, make_controller)
    for _ in range(3):
        cycle(slurm, make_controller)
        slurm.tick()
    assert (slurm.jobs[2].state, slurm.starts[2]) == (JobState.RUNNING, 1)
    assert tags.parse_state(slurm.jobs[2].admin_comment).accumulate_steps == 4


def test_a_job_on_gpus_of_its_policys_choice_gets_a_pilot_beside_its_own_cpus_and_memory():
    node = make_node("n1", gpu_count=1, cpu_count=5, mem_mib=64_000)
    slurm = FakeSlurm([job(1, "long", 10_000, mem_per_node_mib=8_000)], [node])
    decision = decided(slurm, Scripted(Sharer(1, (NodeShare("n1", 1, (0,)),))))
    (start,) = (action for action in decision.actions if isinstance(action, StartGroup))
    assert (start.mem_per_node_mib, start.cpu_count, start.members[0].cpu_count) == (512, 1, 4)


class Scripted(Policy):
    """A policy that gives a prepared answer."""

    name, supports_packing = "scripted", True

    def __init__(self, *sharers: Sharer) -> None:
        self._sharers = sharers

    def plan(self, request: PlanRequest) -> Plan:
        self.request = request
        planned = {sharer.job_id for sharer in self._sharers}
        waiting = tuple(Waiting(each.job_id, (Reason("no"),)) for each in request.jobs if each.job_id not in planned)
        kept = tuple(
            Sharer(unit.members[0].job_id, unit.gpus, kept=True)
            for unit in request.running
            if isinstance(unit, Running)
        )
        return Plan(self.name, waiting=waiting, sharers=(*self._sharers, *kept))


def decided(slurm: FakeSlurm, policy: Scripted, known=KNOWN, **traits: KnownTraits):
    know = Knowledge({each.key: each for each in known}, **traits)
    return decide(CycleInput(view_of(slurm.snapshot()), know, Config(**POLICY)), policy)


def test_gpus_in_part_or_of_two_jobs_are_not_joined_and_the_reason_is_told(make_controller):
    slurm = FakeSlurm([job(1, "long", 10_000), job(2, "long", 10_000)], [make_node("n1", gpu_count=3)])
    cycle(slurm, make_controller)
    slurm.tick()
    slurm.tick()
    slurm.jobs[3] = job(3, "short", 10, gpu_count=2, gpu_request="gres/gpu:2")
    policy = Scripted(Sharer(3, (NodeShare("n1", 2, (0, 2)),)))
    decision = decided(slurm, policy)
    assert [unit.gpus[0].gpu_ids for unit in policy.request.running] == [(0,), (1,)]
    assert policy.request.nodes[0].islands == ((2,),)
    assert policy.request.whole_sets_only
    assert started(decision.actions) == frozenset()
    (waiting,) = decision.plan.waiting
    assert "only join one running job, on just the same GPUs" in str(waiting.reasons[0])


def test_who_shares_with_a_job_that_only_starts_now_joins_it_later():
    slurm = FakeSlurm([job(1, "short", 10_000, accumulate=2), job(2, "long", 10)], [make_node("n1", gpu_count=1)])
    gpus = (NodeShare("n1", 1, (0,)),)
    decision = decided(slurm, Scripted(Sharer(1, gpus, accumulate_steps=2), Sharer(2, gpus)))
    (start,) = (action for action in decision.actions if isinstance(action, StartGroup))
    (member,) = start.members
    assert (member.job_id, member.accumulate_steps, member.gpu_mem_gib) == (1, 2, pytest.approx(5.0))
    assert str(decision.plan.waiting[0].reasons[0]) == "it will join job 1 once that one runs"


def test_a_stored_fit_comes_before_the_profiles():
    known = {each.key: each for each in KNOWN}
    key = ProfileKey("short", 8, 1, "gpu")
    fitted = batch_model(key, known, {}, 8)
    assert (fitted.compute_fixed_s, fitted.compute_per_sample_s) == pytest.approx((0.1, 0.05))
    assert (fitted.fixed_mem_gib, fitted.mem_gib_per_sample, fitted.max_accumulate_steps) == pytest.approx((2, 0.75, 8))
    stored = batch_model(key, known, {computation_name(key): LinearFit(0.2, 0.01, 1.0, 0.0, ())}, 1)
    assert (stored.compute_fixed_s, stored.compute_per_sample_s) == (0.2, 0.01)
    assert batch_model(ProfileKey("long", 8, 1, "gpu"), known, {}, 8) is None  # one batch size tells no line


def test_measured_pairs_come_before_estimates():
    known = {each.key: each for each in KNOWN}
    long, short = ProfileKey("long", 8, 1, "gpu"), ProfileKey("short", 4, 1, "gpu")
    estimates = interference_table([short], [long], known, KnownTraits())
    assert estimates.speeds("long", "short") == pytest.approx((1 / 1.34, 1 / 1.34))
    assert estimates.speeds("long", "long") == pytest.approx((1 / 1.58, 1 / 1.58))
    assert estimates.speeds("short", "short") is None  # none of them runs
    pair = measured_pair(long, short, 1.1, 1.6)
    table = interference_table([long], [short], known, KnownTraits(pairs=(pair,)))
    assert table.speeds("short", "long") == pytest.approx((1 / 1.6, 1 / 1.1))


def test_the_better_of_turns_and_none_counts_unless_all_take_turns():
    known = {each.key: each for each in KNOWN}
    long, short = ProfileKey("long", 8, 1, "gpu"), ProfileKey("short", 4, 1, "gpu")
    plain, turns = measured_pair(long, short, 1.1, 1.1), measured_pair(long, short, 1.6, 1.6, turns=True)
    traits = KnownTraits(pairs=(plain,), pairs_in_turns=(turns,))
    for turns_only, ratio in ((True, 1.6), (False, 1.1)):
        table = interference_table([long], [short], known, traits, turns_only=turns_only)
        assert table.speeds("short", "long") == pytest.approx((1 / ratio, 1 / ratio))


@pytest.mark.configuration(profiling={"mode": "dry-run"})
def test_a_script_that_says_so_in_its_dry_run_can_be_split(make_controller):
    slurm = FakeSlurm([job(2, "new", 100)], [make_node("n1", gpu_count=1)])
    figures = {"load_s": 0.0, "preprocess_s": 0.0, "propagate_s": 0.3, "synchronize_s": 0.0, "iteration_s": 0.3}
    known = (*KNOWN, replace(KNOWN[2], key=ProfileKey("new", 4, 1, "gpu"), iteration_s=0.2))
    with make_controller(slurm, known, **POLICY) as controller:
        controller.cycle()
        (run,) = [each for each in slurm.jobs.values() if read_job(each).role is Role.DRY_RUN]
        token = tags.token(run.admin_comment, tags.DRY_RUN_PREFIX)
        slurm.tick()
        slurm.tick()
        told = {**figures, "iterations": 20, "gpu_mem_gib": 6.0, "accumulates": True, "token": token}
        slurm._update(2, comment=tags.PROFILE_PREFIX + tags.format_json(told))
        slurm.end(run.job_id)
        controller.cycle()
        traits = read_traits(controller._store)
        assert traits.accumulating == {"new of alice (batch 8, 1 × gpu)"}
        profiles = controller._store.list()
    policy = Scripted()
    slurm.jobs[3] = job(3, "new", 100)
    decided(slurm, policy, profiles, traits=traits)
    assert {each.job_id: each.batch.max_accumulate_steps for each in policy.request.jobs}[3] == 8


def test_a_slowdown_fitted_on_the_site_reaches_the_policy_and_damaged_fits_cost_no_cycle(make_controller, caplog):
    slurm = FakeSlurm([job(1, "long", 100)], [make_node("n1", gpu_count=1)])
    curve = Parabola(1.0, 0.01, 0.0)
    fit = SlowdownFit(curve, 0.8, 12, 10.0, 180.0)
    with make_controller(slurm, KNOWN, **POLICY) as controller:
        damaged = [(SLOWDOWNS, "broken", {"curve": "?"}), (FITS, "broken", {"fixed_s": "?"})]
        for kind, name, body in ((SLOWDOWNS, "gpu", asdict(fit)), *damaged):
            controller._store.put_document(kind, Document(name, "2026-01-01T00:00:00+00:00", body))
        traits = read_traits(controller._store)
        controller.cycle()
    assert len(pilots(slurm)) == 1
    policy = Scripted()
    decided(slurm, policy, traits=traits)
    assert policy.request.slowdowns == {"gpu": curve}
    assert "slowdown broken is not used" in caplog.text
