"""Laws of every policy on any trace: conservation, determinism, and shortcuts that change nothing."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_builders import MODELS, job, run, run_under, traces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muri.policies.registry import get_policy, policy_names
from muri.policies.schedulers import Srtf
from muri.policies.types import Plan, PlanRequest, Policy, PriorityKey
from muri.simulator.engine import checks
from muri.simulator.engine import loop as engine
from muri.simulator.engine.jobs import View, WaitingJobs, planned_profiles, view_of
from muri.simulator.model import Cluster, JobRecord, Outage, Settings, SimulationError, SimulationResult, TraceJob

POLICIES = policy_names()
WAYS = ({"mechanism": "proportional"}, {"mechanism": "greedy"})
VARIANTS = [*((name, {}) for name in POLICIES), *(("synergy", way) for way in WAYS)]

SMALL = Cluster(2, 2, gpu_mem_gib=40.0)
CUTTING = [(name, way) for name, way in VARIANTS if view_of(get_policy(name)) != View()]
"""Those that see only as much of the queue as they need; the others see all of it."""


@st.composite
def all_settings(draw: st.DrawFn) -> Settings:
    """Anything that can happen, in any combination."""
    outages = [
        Outage(draw(st.integers(0, 1)), start_s := draw(st.floats(0, 900)), start_s + 200, draw(st.booleans()))
        for _ in range(draw(st.integers(0, 3)))
    ]
    return Settings(
        interval_s=draw(st.sampled_from([0.0, 0.0, 60.0, 37.3])),
        restart_s=draw(st.sampled_from([0.0, 5.0, 90.0])),
        profile_noise=draw(st.sampled_from([0.0, 0.4, 1.0])),
        profiling_s=draw(st.sampled_from([0.0, 30.0])),
        durations_known=draw(st.booleans()),
        outages=tuple(outages),
        checkpoints=draw(st.booleans()),
    )


def fields_of(how: Settings) -> dict[str, Any]:
    """Settings as `run` takes them."""
    return {name: getattr(how, name) for name in Settings.__dataclass_fields__}


def simulated(jobs: list[TraceJob], policy: str, options: dict[str, str], how: Settings) -> SimulationResult:
    return run(jobs, policy, SMALL, options=options, **fields_of(how))


@pytest.mark.parametrize(("policy", "options"), VARIANTS)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=traces(), how=all_settings(), again=st.booleans())
def test_nothing_is_lost_run_twice_or_over_committed(
    policy: str, options: dict[str, str], jobs: list[TraceJob], how: Settings, again: bool
) -> None:
    assert checks.wanted()
    result = simulated(jobs, policy, options, how)
    checks.check_records(jobs, result.records)
    assert not again or simulated(jobs, policy, options, how) == result
    length_s = max(record.end_s for record in result.records)
    assert sum(sample.length_s for sample in result.samples) == pytest.approx(length_s)
    elastic = get_policy(policy).elastic  # more GPUs than asked for make a job faster
    for record in result.records:
        assert elastic or record.run_s >= record.job.service_s * (1 - 1e-9)
        assert record.shared_s <= record.run_s <= record.jct_s * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize(("policy", "options"), CUTTING)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=traces(40), how=all_settings(), max_wait_s=st.sampled_from([float("inf"), 300.0]))
def test_the_end_of_a_long_queue_changes_no_decision(
    policy: str, options: dict[str, str], jobs: list[TraceJob], how: Settings, max_wait_s: float
) -> None:
    """Every plan of a simulation is made twice: for the jobs that matter, and for all."""
    jobs = [replace(item, submit_s=item.submit_s / 5) for item in jobs]
    how = replace(how, interval_s=10 * how.interval_s)  # two plans each time: not too often
    if max_wait_s < float("inf"):
        how = replace(how, restart_s=0.0)  # who has waited long stops others at every plan, before they have restarted
    chosen = get_policy(policy, {"max_wait_s": max_wait_s, **options})
    reduced, whole = WaitingJobs.reduce, [PlanRequest((), (), 0.0)]

    def reduce(waiting: WaitingJobs, request: PlanRequest, gpu_count: int) -> PlanRequest:
        everybody = [live.as_waiting for live in waiting if live.as_waiting is not None]
        whole[0] = replace(request, jobs=tuple(item for item in everybody if item.gpu_count <= gpu_count))
        return reduced(waiting, request, gpu_count)

    def decide(_: engine.Engine, request: PlanRequest) -> Plan:
        plan = chosen.plan(request)
        assert _decisions(plan) == _decisions(chosen.plan(whole[0]))
        return plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WaitingJobs, "reduce", reduce)
        patch.setattr(engine.Engine, "_decide", decide)
        run_under(chosen, jobs, SMALL, **fields_of(how))


def _decisions(plan: Plan) -> tuple[object, ...]:
    """Who runs where; reasons also tell how many others there were."""
    groups = [(group.members, group.gpus, group.kept, tuple(group.speed.items())) for group in plan.groups]
    return groups, [(solo.job_id, solo.gpus, solo.kept) for solo in plan.solo]


def test_noise_is_of_the_size_asked_for_and_only_policies_see_it() -> None:
    jobs = [job(index, 0.0, 300.0, (1.0, 0.0, 1.0, 1.0)) for index in range(200)]
    planned = planned_profiles(jobs, 0.2, seed=3)
    stages = [planned[index].load_s for index in range(200)]
    assert 0.8 <= min(stages) < 0.85
    assert 1.15 < max(stages) <= 1.2
    assert planned == planned_profiles(list(reversed(jobs)), 0.2, seed=3)
    assert planned != planned_profiles(jobs, 0.2, seed=4)
    exact = planned_profiles(jobs, 0.0, seed=3)
    assert exact[0] is exact[199]
    assert exact[0] == jobs[0].profile
    # Alone, a job takes its true time whatever its profile says.
    (record,) = run([jobs[0]], "muri-s", Cluster(1, 1), profile_noise=1.0).records
    assert record.end_s == 300.0


def test_the_order_of_hashes_and_the_wall_clock_decide_nothing() -> None:
    program = (
        "import json, sys\n"
        "from dataclasses import asdict\n"
        "from engine_builders import MODELS, run\n"
        "from muri.simulator.model import Cluster, Outage, TraceJob\n"
        "jobs = [TraceJob(i, 17.0 * (i // 3), (1, 2, 4)[i % 3], 200 + 37 * (i % 11), MODELS[i % 4],\n"
        "                 opportunistic=i % 2 == 0) for i in range(24)]\n"
        "for policy in ('muri-s', 'muri-l', 'muri-jct', 'antman', 'tiresias'):\n"
        "    how = dict(interval_s=0.0, profile_noise=0.3, outages=(Outage(1, 100.0, 400.0),), seed=5)\n"
        "    result = asdict(run(jobs, policy, Cluster(2, 4), with_spans=True, **how))\n"
        "    del result['decision_s'], result['wall_s']\n"
        "    print(json.dumps(result))\n"
    )
    outputs = []
    for seed in ("0", "31337"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert len(json.loads(outputs[0].splitlines()[0])["records"]) == 24


def test_checks_notice_what_is_wrong() -> None:
    jobs = [job(1, 10.0, 50.0), job(2, 10.0, 50.0)]
    fine = run(jobs, "fifo", Cluster(1, 2)).records
    with pytest.raises(checks.ConservationError, match="job 2 ended 0 times"):
        checks.check_records(jobs, fine[:1])
    with pytest.raises(checks.ConservationError, match="job 1 ended 2 times"):
        checks.check_records(jobs, [*fine, fine[0]])
    early = JobRecord(jobs[0], start_s=5.0, end_s=60.0)
    with pytest.raises(checks.ConservationError, match=r"submitted at 10.0 s, starts at 5.0 s"):
        checks.check_records(jobs, [early, fine[1]])


class _RoundRobin(Srtf):
    """The job that started last is stopped at the next plan."""

    name = "round-robin"

    def key(self, request: PlanRequest) -> PriorityKey:
        """Those who run go last."""
        running = {member.job_id for unit in request.running for member in unit.members}
        return lambda job: (float(job.job_id in running),)


def test_a_policy_that_stops_jobs_before_they_have_restarted_does_not_hang_the_simulation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "_IDLE_PLANS", 100)
    jobs = [job(index, 0.0, 1000.0) for index in range(2)]
    with pytest.raises(SimulationError, match="stops jobs before they have restarted"):
        run_under(_RoundRobin(), jobs, Cluster(1, 1), interval_s=10.0, restart_s=60.0)


class _Greedy(Policy):
    """A policy that breaks whatever it is told to."""

    name = "greedy"

    def __init__(self, breaks: str) -> None:
        self._breaks = breaks
        self._inner = get_policy("fifo")

    def plan(self, request: PlanRequest) -> Plan:
        """First in, first out, and then something that cannot be."""
        plan = self._inner.plan(request)
        if self._breaks == "twice":
            return replace(plan, solo=(*plan.solo, *plan.solo))
        if self._breaks == "stranger":
            return replace(plan, solo=tuple(replace(solo, job_id=99) for solo in plan.solo))
        if self._breaks == "over-commits":
            return replace(plan, solo=tuple(replace(solo, gpus=plan.solo[0].gpus) for solo in plan.solo))
        if self._breaks == "raises":
            raise KeyError("speed" * 1000)
        if self._breaks == "nothing":
            return None  # type: ignore[return-value]
        if self._breaks == "to-slurm":
            return replace(plan, solo=tuple(replace(solo, gpus=()) for solo in plan.solo))
        return Plan("greedy")


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        ("twice", "a plan must not give out GPUs twice"),
        ("stranger", "starts job 99, which doesn't wait"),
        ("over-commits", "more GPUs of node n0 than are free"),
        ("to-slurm", "leaves job 1 to Slurm's own queue"),
        ("starts-nobody", "starts none of the 2 jobs"),
        ("nothing", "^policy greedy returned NoneType, not a Plan$"),
    ],
)
def test_a_policy_that_plans_nonsense_is_told_so(breaks: str, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        run_under(_Greedy(breaks), [job(1, 0.0, 50.0), job(2, 0.0, 50.0)], Cluster(2, 1))


def test_a_policy_that_fails_is_told_where_in_a_few_lines() -> None:
    with pytest.raises(SimulationError) as caught:
        run_under(_Greedy("raises"), [job(1, 0.0, 50.0)], Cluster(2, 1))
    text = str(caught.value)
    assert text.startswith("policy greedy failed: KeyError: 'speedspeed")
    assert text.endswith("""in plan: raise KeyError("speed" * 1000)""")
    assert (len(text) < 1000, text.count("\n")) == (True, 1)


def test_a_trace_of_thousands_of_events_is_thinned_without_changing_its_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(checks.SWITCH, "0")  # small traces check every step
    jobs = [TraceJob(index, 3.0 * index, 1, 20, MODELS[index % 4]) for index in range(1500)]
    result = run(jobs, "fifo", Cluster(1, 4))
    assert 500 < len(result.samples) <= 2000
    length_s = max(record.end_s for record in result.records)
    held = sum(sample.gpus_held * sample.length_s for sample in result.samples)
    assert sum(sample.length_s for sample in result.samples) == pytest.approx(length_s)
    assert held == pytest.approx(sum(record.run_s for record in result.records))
    assert all(record.end_s > 3.0 * record.job.job_id for record in result.records)
