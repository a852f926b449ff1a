"""CPUs and host memory that plans give out: cases worked out by hand, and conservation under stub policies."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
from engine_builders import CPU, GPU, by_id, ends, job, profile, run, run_under, traces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muri.policies.registry import get_policy
from muri.policies.siblings.shares import shape_with, throughput_ratio
from muri.policies.speed import shape_of
from muri.policies.traits import Demand, Sensitivity, derived_sensitivity
from muri.policies.types import CpuMemShare, Plan, PlanRequest, Policy
from muri.simulator.model import Cluster, SimulationError, TraceJob

HALF_CPU = (0.0, 0.5, 0.5, 0.0)
NODE = Cluster(1, 2, cpus_per_node=8, mem_gib_per_node=100)
FAIR = Demand(4.0, 50.0)
MEMORY_HUNGRY = Sensitivity((1.0, 4.0), (25.0, 50.0, 75.0), ((0.5, 1.0, 1.0), (0.5, 1.0, 2.0)), Demand(1.0, 75.0))

Shares = Callable[[PlanRequest, Plan], Mapping[int, tuple[CpuMemShare, ...]]]


@dataclass
class Allocating(Policy):
    """Another policy's plans with shares on top."""

    shares: Shares
    inner: str = "fifo"
    name: str = "allocating"

    def plan(self, request: PlanRequest) -> Plan:
        """Decide as the inner policy does, then give out CPUs and memory."""
        plan = get_policy(self.inner, {"max_wait_s": float("inf")}).plan(request)
        return Plan(self.name, plan.groups, plan.solo, plan.waiting, cpu_mem_shares=self.shares(request, plan))


def fixed(**by_job: tuple[float, float]) -> Shares:
    """Shares of node n0 by j1, j2, …, while these run."""

    def shares(_: PlanRequest, plan: Plan) -> Mapping[int, tuple[CpuMemShare, ...]]:
        started = {member for group in plan.groups for member in group.members} | {solo.job_id for solo in plan.solo}
        wanted = {int(name[1:]): share for name, share in by_job.items()}
        return {job_id: (CpuMemShare("n0", *share),) for job_id, share in wanted.items() if job_id in started}

    return shares


def test_more_cpus_shorten_preprocessing_and_fewer_lengthen_it() -> None:
    policy = Allocating(fixed(j1=(6.0, 50.0), j2=(2.0, 50.0)))
    result = run_under(policy, [job(1, 0.0, 300.0, HALF_CPU), job(2, 0.0, 300.0, HALF_CPU)], NODE)
    # With 6 CPUs instead of 4 the preprocess half takes 2/3 of its time; with 2 twice.
    assert by_id(result)[1].run_s == pytest.approx(300 * (0.5 + 0.5 * 4 / 6))
    assert by_id(result)[2].run_s == pytest.approx(300 * (0.5 + 0.5 * 2))
    assert by_id(result)[1].restarts == 0
    # The CPU-seconds of the work are those of the proportional share: both use 2 of the 8 CPUs at full speed.
    first = result.samples[0]
    assert first.utilization[1] == pytest.approx((2 / (5 / 6) + 2 / 1.5) / 8)


def test_memory_acts_as_the_job_s_sensitivity_says() -> None:
    policy = Allocating(fixed(j1=(4.0, 75.0), j2=(4.0, 25.0)))
    jobs = [job(1, 0.0, 100.0, GPU, sensitivity=MEMORY_HUNGRY), job(2, 0.0, 100.0, GPU, sensitivity=MEMORY_HUNGRY)]
    assert ends(run_under(policy, jobs, NODE)) == {1: 50.0, 2: 200.0}


def test_synergy_s_models_are_known_by_name() -> None:
    cluster = Cluster(1, 8, cpus_per_node=24, mem_gib_per_node=500)
    result = run_under(Allocating(fixed(j1=(6.0, 62.5))), [job(1, 0.0, 100.0, GPU, name="alexnet")], cluster)
    assert ends(result)[1] == pytest.approx(100 / 1.75)


def test_another_share_costs_a_restart_and_the_same_one_none() -> None:
    def shares(request: PlanRequest, _: Plan) -> Mapping[int, tuple[CpuMemShare, ...]]:
        return {1: (CpuMemShare("n0", 8.0 if request.now_s >= 100 else 2.0, 50.0),)}

    jobs = [job(1, 0.0, 300.0, HALF_CPU), job(2, 50.0, 1.0, GPU), job(3, 100.0, 1.0, GPU)]
    result = by_id(run_under(Allocating(shares), jobs, Cluster(1, 4, cpus_per_node=16), restart_s=30.0))
    assert result[1].restarts == 1
    # Until 100 s at a speed of 1 / 1.5, then 30 s of restart, then at 1 / 0.75.
    assert result[1].end_s == pytest.approx(130 + (300 - 100 / 1.5) * 0.75)


def test_a_group_s_cpu_stage_has_all_of_its_members_shares() -> None:
    jobs = [job(1, 0.0, 100.0, GPU), job(2, 0.0, 100.0, CPU)]
    cluster = Cluster(1, 1, cpus_per_node=4)
    assert set(ends(run(jobs, "muri-s", cluster)).values()) == {100.0}
    # 1 + 1 of 4 CPUs: the CPU stage takes 2 s instead of 1 s, and with it everybody's period.
    records = by_id(run_under(Allocating(fixed(j1=(1.0, 0.0), j2=(1.0, 0.0)), "muri-s"), jobs, cluster))
    # When job 1 or 2 leaves, the other one has its own single CPU left: job 2 would be four times slower.
    assert records[1].end_s == records[2].end_s == pytest.approx(200.0)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (fixed(j1=(6.0, 50.0), j2=(6.0, 50.0)), "gives out more CPUs of node n0 than it has"),
        (fixed(j1=(4.0, 60.0)), "gives out more memory of node n0 than it has"),
        (fixed(j1=(-1.0, 50.0)), "job 1 -1.0 CPUs"),
        (lambda _, __: {1: (CpuMemShare("n7", 1.0, 1.0),)}, "GPUs of n0 but CPUs and memory of n7"),
    ],
)
def test_what_a_node_doesn_t_have_cannot_be_given_out(shares: Shares, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        run_under(Allocating(shares), [job(1, 0.0, 300.0, HALF_CPU), job(2, 0.0, 300.0, HALF_CPU)], NODE)


def test_policies_see_sensitivities_shares_and_what_is_free() -> None:
    seen: list[PlanRequest] = []

    def shares(request: PlanRequest, plan: Plan) -> Mapping[int, tuple[CpuMemShare, ...]]:
        seen.append(request)
        return fixed(j1=(6.0, 20.0), j2=(2.0, 50.0))(request, plan)

    run_under(Allocating(shares), [job(1, 0.0, 300.0, HALF_CPU), job(2, 10.0, 20.0, HALF_CPU)], NODE)
    (node,) = seen[1].nodes
    assert (node.cpu_count, node.mem_gib, node.free_cpus, node.free_mem_gib) == (8, 100, 2.0, 80.0)
    (unit,) = seen[1].running
    assert unit.cpu_mem_shares == {1: (CpuMemShare("n0", 6.0, 20.0),)}
    waiting = seen[1].jobs[0]
    assert waiting.sensitivity is not None
    assert waiting.sensitivity.demand == (5.0, 50.0)
    assert waiting.gpu_utilization == 0.5


def test_a_derived_sensitivity_follows_the_stage_profile() -> None:
    found = derived_sensitivity(profile(HALF_CPU), FAIR, 8.0)
    assert found is not None
    for cpus in (0.5, 1.0, 2.0, 4.0, 8.0):
        assert found.throughput_at(cpus, 10.0) == pytest.approx(1 / (0.5 + 0.5 * 4 / cpus))
    assert derived_sensitivity(profile(GPU), FAIR, 8.0).demand.cpus == 1.0  # type: ignore[union-attr]
    assert derived_sensitivity(profile(HALF_CPU), Demand(float("inf"), 50.0), 8.0) is None
    assert derived_sensitivity(profile(CPU), Demand(0.5, 50.0), 0.5).demand.cpus == 0.5  # type: ignore[union-attr]


@settings(deadline=None)
@given(
    stages=st.tuples(*[st.floats(0.01, 5)] * 4),
    cpus=st.floats(0.25, 24),
    mem_gib=st.floats(1, 100),
)
def test_stages_and_throughput_agree(stages: tuple[float, ...], cpus: float, mem_gib: float) -> None:
    shape, given_share = shape_of(profile(stages)), Demand(cpus, mem_gib)
    for sensitivity in (derived_sensitivity(profile(stages), FAIR, 24.0), MEMORY_HUNGRY, None):
        ratio = throughput_ratio(sensitivity, given_share, FAIR)
        other = shape_with(shape, sensitivity, given_share, FAIR)
        assert other.iteration_s == pytest.approx(shape.iteration_s / ratio)
        assert min(other.stage_s) >= 0
        assert other.stage_s[2:] == shape.stage_s[2:]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=traces(), seed=st.integers(0, 1000), inner=st.sampled_from(["fifo", "srtf", "muri-s"]))
def test_whatever_is_given_out_nothing_is_lost_or_over_committed(jobs: list[TraceJob], seed: int, inner: str) -> None:
    """Random shares within what each node has; the checks of every step are on."""
    chance = random.Random(seed)
    cluster = Cluster(2, 2, cpus_per_node=12, mem_gib_per_node=64)

    def shares(_: PlanRequest, plan: Plan) -> Mapping[int, tuple[CpuMemShare, ...]]:
        units = [(group.members, group.gpus) for group in plan.groups]
        units += [((solo.job_id,), solo.gpus) for solo in plan.solo]
        return {
            member: tuple(
                CpuMemShare(share.node, portion * 6 * share.gpu_count, portion * 32 * share.gpu_count) for share in gpus
            )
            for members, gpus in units
            if chance.random() < 0.6
            for portion in [chance.uniform(0.1, 1.0) / len(members)]
            for member in members
        }

    result = run_under(Allocating(shares, inner), jobs, cluster, restart_s=0.0, interval_s=500.0)
    assert len(result.records) == len(jobs)


@pytest.mark.parametrize(
    ("policy", "options"),
    [("synergy", {}), ("synergy", {"mechanism": "greedy", "order": "srtf"}), ("drf", {}), ("tetris", {})],
)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=traces(), interval_s=st.sampled_from([0.0, 300.0]))
def test_synergy_s_policies_keep_to_what_nodes_have(
    policy: str, options: dict[str, str], jobs: list[TraceJob], interval_s: float
) -> None:
    cluster = Cluster(2, 2, cpus_per_node=6, mem_gib_per_node=64)
    assert len(run(jobs, policy, cluster, options=options, restart_s=5.0, interval_s=interval_s).records) == len(jobs)
