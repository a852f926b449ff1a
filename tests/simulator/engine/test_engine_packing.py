"""Jobs that share GPUs one by one: cases worked out by hand, and conservation under random plans."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import pytest
from engine_builders import CPU, GPU, STORAGE, by_id, ends, job, run_under, traces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_engine_laws import all_settings, fields_of

from muri.policies.cycle.validation import check_request
from muri.policies.traits import BatchModel, PairSpeed
from muri.policies.types import Group, NodeShare, Plan, PlanJob, PlanRequest, Policy, Sharer, Waiting
from muri.profiler.slowdown import published_slowdown
from muri.simulator.metrics import Outcome, TraceSummary, metrics_of, summarize, table_of
from muri.simulator.model import Cluster, Run, Settings, SimulationError, SimulationResult, Trace, TraceJob

Planner = Callable[[PlanRequest], Iterable[Sharer]]

TWO_GPUS = Cluster(1, 2)
PAIRS = (PairSpeed("a", "b", 0.5, 0.8), PairSpeed("a", "c", 0.25, 1.0), PairSpeed("b", "c", 0.5, 0.5))


def on(job_id: int, *gpu_ids: int, node: str = "n0", steps: int = 1) -> Sharer:
    """A job on GPUs of one node."""
    return Sharer(job_id, (NodeShare(node, len(gpu_ids), gpu_ids),), accumulate_steps=steps)


@dataclass
class Packing(Policy):
    """Jobs in the request that have a seat get it; the others wait."""

    planner: Planner
    elastic: bool = False
    name: str = "packing"
    supports_packing: bool = True
    seen: list[PlanRequest] = field(default_factory=list)

    def plan(self, request: PlanRequest) -> Plan:
        """Put jobs where the test says, after a check of the request."""
        check_request(request, packed=True, elastic=self.elastic)
        self.seen.append(request)
        there = [member for unit in request.running for member in unit.members] + list(request.jobs)
        seats = {sharer.job_id: sharer for sharer in self.planner(request)}
        sharers = tuple(seats[item.job_id] for item in there if item.job_id in seats)
        waiting = tuple(Waiting(item.job_id) for item in there if item.job_id not in seats)
        return Plan(self.name, sharers=sharers, waiting=waiting)


def packed(
    jobs: list[TraceJob], planner: Planner | list[Sharer], cluster: Cluster = TWO_GPUS, **how: object
) -> tuple[SimulationResult, Packing]:
    """Simulate under a policy that says who is where."""
    elastic = bool(how.pop("elastic", False))
    policy = Packing((lambda _: planner) if isinstance(planner, list) else planner, elastic)
    return run_under(policy, jobs, cluster, **how), policy


def test_neighbors_slow_each_other_down_by_their_pair_speeds_and_pay_no_restart() -> None:
    jobs = [job(1, 0.0, 100.0, name="a"), job(2, 50.0, 40.0, name="b")]
    result, _ = packed(jobs, [on(1, 0), on(2, 0)], interference=PAIRS, with_spans=True)
    # b takes 40 / 0.8 = 50 s beside a, which meanwhile does 25 s of work.
    assert ends(result) == {1: 125.0, 2: 100.0}
    assert [record.restarts for record in result.records] == [0, 0]
    assert [record.shared_s for record in result.records] == [50.0, 50.0]
    assert [sample.gpus_held for sample in result.samples] == [1, 1, 1]
    # It is one of two GPUs, and cannot be busier than all the time, though the jobs get 0.5 and 0.8 of it.
    assert [sample.utilization[2] for sample in result.samples] == [0.5, pytest.approx(0.5), pytest.approx(0.5)]
    stays = [(span.start_s, span.end_s, span.members, span.gpu_count) for span in result.spans]
    assert stays == [(0.0, 50.0, (1,), 1), (50.0, 100.0, (1, 2), 1), (100.0, 125.0, (1,), 1)]


def test_pair_speeds_multiply_and_the_slowest_gpu_counts() -> None:
    a = job(1, 0.0, 100.0, name="a", gpu_count=2)
    jobs = [a, job(2, 0.0, 1000.0, name="b"), job(3, 0.0, 1000.0, name="c")]
    assert ends(packed(jobs, [on(1, 0, 1), on(2, 0), on(3, 1)], interference=PAIRS)[0])[1] == 400.0
    assert ends(packed(jobs, [on(1, 0, 1), on(2, 0), on(3, 0)], interference=PAIRS)[0])[1] == 800.0


def test_a_pair_that_nobody_measured_is_estimated_from_its_profiles() -> None:
    jobs = [job(1, 0.0, 100.0, (0.5, 0.0, 0.5, 0.0)), job(2, 0.0, 100.0, (0.0, 0.0, 0.5, 0.5))]
    result, policy = packed(jobs, [on(1, 0), on(2, 0)])
    # ξ = 1 + Σ u_a u_b = 1.25; the policy plans with the same.
    assert ends(result) == {1: 125.0, 2: 125.0}
    table = policy.seen[0].interference
    assert table is not None
    assert table.speeds(jobs[0].key.model, jobs[1].key.model) == (0.8, 0.8)


def test_the_other_truth_is_horus_s_function_of_utilization() -> None:
    jobs = [job(1, 0.0, 100.0, gpu_utilization=0.9), job(2, 0.0, 100.0, CPU, gpu_utilization=0.6), job(3, 0.0, 100.0)]
    result, _ = packed(jobs, [on(1, 0), on(2, 0), on(3, 1)], slowdown="utilization")
    assert ends(result) == {number: pytest.approx(100 * published_slowdown("gpu")(150.0)) for number in (1, 2)} | {
        3: 100.0
    }


BATCH = BatchModel(32, 0.25, 0.75 / 32, fixed_mem_gib=4.0, mem_gib_per_sample=0.5, max_accumulate_steps=4)


def test_a_divided_batch_is_slower_and_another_division_is_a_restart() -> None:
    jobs = [job(1, 0.0, 100.0, batch=BATCH), job(2, 100.0, 10.0)]
    # An iteration of 1 s takes 1.25 s in two steps.
    assert ends(packed(jobs, [on(1, 0, steps=2), on(2, 1)])[0]) == {1: 125.0, 2: 110.0}
    result, _ = packed(
        jobs, lambda request: [on(1, 0, steps=2 if request.now_s < 100 else 1), on(2, 1)], restart_s=30.0
    )
    assert by_id(result)[1].restarts == 1
    assert by_id(result)[1].end_s == pytest.approx(100 + 30 + 20)


def test_moved_gpus_are_a_restart_and_a_neighbor_that_leaves_is_none() -> None:
    jobs = [job(1, 0.0, 200.0, GPU), job(2, 0.0, 100.0, GPU)]
    result, _ = packed(jobs, lambda request: [on(1, 0 if request.now_s < 100 else 1), on(2, 0)], restart_s=30.0)
    # Both want the GPU all the time, so beside each other they run at half their speed until 200 s.
    assert by_id(result)[2].restarts == by_id(result)[1].restarts == 0
    moved, _ = packed(
        [*jobs, job(3, 100.0, 1.0)],
        lambda request: [on(1, 0 if request.now_s < 100 else 1), on(2, 0), on(3, 1)],
        restart_s=30.0,
    )
    assert by_id(moved)[1].restarts == 1
    assert by_id(moved)[2].restarts == 0
    # Job 2 does half its work until 100 s, and the rest at full speed.
    assert by_id(moved)[2].end_s == 150.0


def test_a_job_that_finds_no_memory_fails_and_asks_for_more() -> None:
    jobs = [job(1, 0.0, 100.0, gpu_mem_gib=12.0), job(2, 50.0, 100.0, CPU, gpu_mem_gib=10.0)]

    def planner(request: PlanRequest) -> list[Sharer]:
        asked = {item.job_id: item.gpu_mem_request_gib for item in request.jobs}
        alone = bool(asked.get(2)) or any(unit.gpus[0].gpu_ids == (1,) for unit in request.running)
        return [on(1, 0), on(2, 1 if alone else 0)]

    result, policy = packed(jobs, planner, Cluster(1, 2, gpu_mem_gib=16.0), restart_s=30.0)
    failed = by_id(result)[2]
    # It fails after its first iteration of 1 s, loses it, and starts again elsewhere.
    assert (failed.out_of_memory, failed.restarts, failed.end_s) == (1, 1, 51 + 30 + 100)
    assert by_id(result)[1].out_of_memory == by_id(result)[1].restarts == 0
    requests = [item.gpu_mem_request_gib for request in policy.seen for item in request.jobs if item.job_id == 2]
    assert requests == [None, 15.0]
    assert metrics_of(result).out_of_memory == 1
    assert [column.header for column in table_of(_summary(result)).columns][-1] == "OOM"
    fine, _ = packed(jobs, [on(1, 0), on(2, 1)], Cluster(1, 2, gpu_mem_gib=16.0))
    assert [column.header for column in table_of(_summary(fine)).columns][-1] == "SPEED-UP"


def _summary(result: SimulationResult) -> TraceSummary:
    made = Run("packing", Trace("made", ()), "packing", result.cluster, result.settings)
    (summary,) = summarize([Outcome(made, result, metrics_of(result))])
    return summary


def test_failing_again_and_again_ends_when_it_asks_for_a_whole_gpu() -> None:
    jobs = [job(1, 0.0, 100.0, gpu_mem_gib=12.0), job(2, 0.0, 100.0, CPU, gpu_mem_gib=5.0)]

    def planner(request: PlanRequest) -> list[Sharer]:
        asked = {item.job_id: item.gpu_mem_gib for item in request.jobs}
        alone = asked.get(2, 0.0) >= 16 or any(unit.gpus[0].gpu_ids == (1,) for unit in request.running)
        return [on(1, 0), on(2, 1 if alone else 0)]

    result, _ = packed(jobs, planner, Cluster(1, 2, gpu_mem_gib=16.0), restart_s=10.0)
    assert by_id(result)[2].out_of_memory == 3  # 5 GiB, 7.5, 11.25, and then 16
    assert by_id(result)[1].end_s <= 100 * 2


def test_memory_that_is_given_back_in_time_is_no_failure() -> None:
    jobs = [job(1, 0.0, 50.5, (0.0, 0.0, 0.5, 0.0), gpu_mem_gib=12.0), job(2, 50.0, 100.0, CPU, gpu_mem_gib=10.0)]
    result, _ = packed(jobs, [on(1, 0), on(2, 0)], Cluster(1, 1, gpu_mem_gib=16.0))
    assert by_id(result)[2].out_of_memory == 0
    assert ends(result) == {1: 50.5, 2: 150.0}


def test_an_elastic_job_follows_the_model_that_pollux_plans_with() -> None:
    from muri.policies.traits import iteration_model, relative_goodput

    known = job(1, 0.0, 100.0, (0.0, 0.0, 0.5, 0.5), gpu_count=2)
    for count in (1, 4):
        speed = relative_goodput(iteration_model(known.profile), 2, count)
        result, _ = packed([known], [on(1, *range(count))], Cluster(1, 4), elastic=True)
        assert ends(result)[1] == pytest.approx(100.0 / speed)
    assert ends(packed([known], [on(1, 0, 1)], Cluster(1, 4), elastic=True)[0])[1] == 100.0


@pytest.mark.parametrize(
    ("sharers", "message"),
    [
        ([on(1, 0, 0)], "calls them"),
        ([on(1, 0, 7)], "calls them"),
        ([on(1, 0)], "gives 1 GPUs to job 1, which asked for 2"),
        ([on(1, 0, 1, node="n9")], "GPUs of node n9, where no job may start"),
        ([on(1, 0, 1, steps=0)], "in no step"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(sharers: list[Sharer], message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        packed([job(1, 0.0, 10.0, gpu_count=2)], sharers)


def test_a_job_that_fits_no_gpu_undivided_is_refused_when_it_is_not_divided() -> None:
    needs_20 = job(1, 0.0, 100.0, batch=BATCH)
    cluster = Cluster(1, 1, gpu_mem_gib=16.0)
    assert ends(packed([needs_20], [on(1, 0, steps=2)], cluster)[0]) == {1: 125.0}
    with pytest.raises(SimulationError, match=r"needs 20.0 GiB on each GPU where its batch is computed in 1 steps"):
        packed([needs_20], [on(1, 0)], cluster)
    with pytest.raises(SimulationError, match=r"needs 20.5 GiB of GPU memory"):
        packed([replace(needs_20, batch=replace(BATCH, fixed_mem_gib=16.5))], [on(1, 0)], cluster)


def test_members_of_a_plain_group_run_side_by_side_and_a_group_that_takes_turns_doesn_t() -> None:
    @dataclass
    class Grouping(Policy):
        mode: str
        name: str = "grouping"
        plain_groups: bool = True
        seen: list[PlanRequest] = field(default_factory=list)

        def plan(self, request: PlanRequest) -> Plan:
            self.seen.append(request)
            group = Group((1, 2), (NodeShare("n0", 1),), 1, 0.0, 1.0, {}, mode=self.mode)  # type: ignore[arg-type]
            return Plan("grouping", groups=(group,))

    jobs = [job(1, 0.0, 100.0, STORAGE, name="a"), job(2, 0.0, 100.0, CPU, name="b")]
    for mode, expected in (("interleave", {1: 100.0, 2: 100.0}), ("plain", {1: 162.5, 2: 125.0})):
        policy = Grouping(mode)
        assert ends(run_under(policy, jobs, Cluster(1, 1), interference=PAIRS)) == expected
        assert policy.seen[0].interference is not None
    # Beside b, a does 62.5 s of work in the first 125 s, and the rest alone.


def random_planner(chance: random.Random, *, elastic: bool) -> Planner:
    """Plans that keep most of what runs, and overcommit memory now and then."""

    def planner(request: PlanRequest) -> Iterable[Sharer]:
        for position, unit in enumerate(request.running):
            if position == 0 or chance.random() < 0.9:
                yield Sharer(unit.members[0].job_id, unit.gpus, accumulate_steps=unit.accumulate_steps)
        for item in request.jobs:
            chosen = random_places(chance, request, item, elastic=elastic)
            nodes = sorted({node for node, _ in chosen})
            ids = {node: tuple(gpu for name, gpu in chosen if name == node) for node in nodes}
            shares = tuple(NodeShare(node, len(ids[node]), ids[node]) for node in nodes)
            if shares:
                yield Sharer(item.job_id, shares, accumulate_steps=chance.choice([1, 2]) if item.batch else 1)

    return planner


def random_places(
    chance: random.Random, request: PlanRequest, item: PlanJob, *, elastic: bool
) -> list[tuple[str, int]]:
    """Some GPUs, used or not; a job that failed goes to unused ones."""
    places = [(node.name, gpu_id) for node in request.nodes for gpu_id in node.topology[0]]
    count = chance.randint(1, len(places)) if elastic and places else item.gpu_count
    if item.gpu_mem_request_gib is not None:
        places = [(node.name, gpu_id) for node in request.nodes for island in node.islands for gpu_id in island]
        count = item.gpu_count
    if count > len(places) or (chance.random() < 0.2 and request.running):
        return []
    return chance.sample(places, count)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=traces(), how=all_settings(), seed=st.integers(0, 10_000), elastic=st.booleans(), truth=st.booleans())
def test_whoever_joins_whom_nothing_is_lost_run_twice_or_over_committed(
    jobs: list[TraceJob], how: Settings, seed: int, elastic: bool, truth: bool
) -> None:
    """Every step is checked: GPUs, memory, jobs and GPU-seconds."""
    jobs = [replace(item, batch=replace(BATCH, fixed_mem_gib=8.0)) if item.job_id % 3 == 0 else item for item in jobs]
    fields = fields_of(how) | {"slowdown": "utilization" if truth else "pairs", "restart_s": min(how.restart_s, 5.0)}
    planner = random_planner(random.Random(seed), elastic=elastic)
    result, _ = packed(jobs, planner, Cluster(2, 2, gpu_mem_gib=48.0), elastic=elastic, **fields)
    assert len(result.records) == len(jobs)
    for record in result.records:
        assert record.shared_s <= record.run_s <= record.jct_s * (1 + 1e-9) + 1e-9
    for sample in result.samples:
        assert 0 <= sample.utilization[2] <= sample.gpus_held / 4 + 1e-9
        assert sample.gpus_held <= 4
