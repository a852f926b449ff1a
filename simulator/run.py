"""Simulate a trace under a policy."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from muri.policies.options import PolicyOptions
from muri.policies.registry import get_policy
from muri.policies.schedulers.base import QueuePolicy
from muri.policies.speed.registry import speed_model
from muri.policies.types import Policy
from muri.simulator import checks
from muri.simulator.crowding import crowding_of
from muri.simulator.engine import Engine
from muri.simulator.model import Cluster, Settings, SimulationError, SimulationResult, Trace, TraceJob
from muri.simulator.nodes import Nodes
from muri.simulator.pace import Pace, Speeds, pace_of
from muri.simulator.packed_nodes import PackedNodes
from muri.simulator.packed_world import PackedWorld
from muri.simulator.pairs import Pairs
from muri.simulator.published import simulate_published
from muri.simulator.refusals import check_cluster, check_noise, check_sizes
from muri.simulator.sensitivity import sensitivities_of
from muri.simulator.waiting import WaitingJobs, view_of
from muri.simulator.world import World


def simulate(
    trace: Trace,
    policy_name: str,
    cluster: Cluster,
    settings: Settings,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[float], None] | None = None,
    *,
    with_spans: bool = False,
) -> SimulationResult:
    """Simulate a trace until its last job ends.

    The same arguments give the same result, byte for byte, save for the two wall-clock fields.

    Under the default model a job's first start costs nothing beyond its service time; a later start, a move and a
    regrouping cost its restart time, during which it holds GPUs and doesn't get on. A dry run holds no GPUs of the
    cluster. GPU memory limits groups. CPUs and host memory are held in proportion to GPUs, unless a plan says
    otherwise: then they make jobs faster or slower.

    Args:
        trace: The jobs.
        policy_name: One of `muri.policies.registry.policy_names`; of `muri.simulator.published.PUBLISHED_POLICIES`
            under the reference model.
        cluster: Where they run.
        settings: How to simulate.
        options: Policy options by name that the user chose. Unlike on a cluster, `max_wait_s` is infinite unless
            it is among them, and nothing is proven of each plan's groups.
        progress: Called now and then with the share of the jobs that have ended, 0 to 1.
        with_spans: Whether the result tells who shared GPUs with whom and when.

    Raises:
        SimulationError: The trace cannot run on the cluster, or a setting is wrong.
        muri.policies.registry.UnknownPolicyError: Lists the policies there are.
        muri.policies.options.OptionsError: An option is unknown, wrong, or contradicts the policy.
    """
    model = simulate_published if settings.model == "reference" else _simulate_cluster
    return model(trace, policy_name, cluster, settings, options, progress, with_spans=with_spans)


def _simulate_cluster(
    trace: Trace,
    policy_name: str,
    cluster: Cluster,
    settings: Settings,
    options: Mapping[str, Any] | None,
    progress: Callable[[float], None] | None,
    *,
    with_spans: bool,
) -> SimulationResult:
    """The default model: Slurm's cluster with intervals, restarts and placement."""
    _check_settings(settings, cluster)
    _check_trace(trace, cluster)
    begin_s = time.perf_counter()
    policy = get_policy(policy_name, {"max_wait_s": math.inf, "certify": False, **(options or {})})
    world, engine = _prepare(trace.jobs, policy, cluster, settings, progress)
    world.spans = [] if with_spans else None
    engine.run(trace.jobs)
    records = tuple(sorted(world.records, key=lambda record: record.job.job_id))
    checks.check_records(trace.jobs, records)
    return SimulationResult(
        policy=policy_name,
        trace=trace.name,
        settings=settings,
        cluster=cluster,
        records=records,
        samples=world.meter.samples(),
        spans=tuple(world.spans or ()),
        decision_s=tuple(engine.decision_s),
        wall_s=time.perf_counter() - begin_s,
    )


def _prepare(
    jobs: Sequence[TraceJob],
    policy: Policy,
    cluster: Cluster,
    settings: Settings,
    progress: Callable[[float], None] | None,
) -> tuple[World, Engine]:
    rules = policy.rules if isinstance(policy, QueuePolicy) else PolicyOptions()
    if rules.speed_model == "measured" and not settings.interference:
        raise SimulationError(
            f"policy {policy.name} has the speed model 'measured', which needs measured pairs: give a table with "
            "--interference, or take speed_model=lockstep or speed_model=fair"
        )
    packs, pairs = policy.supports_packing, Pairs(settings.interference, jobs)
    table = pairs.table if packs or policy.plain_groups or settings.interference else None
    # Made here too, so that a model that lacks its table is refused before anything runs.
    model = speed_model(rules.speed_model, ordering=rules.ordering, table=table)
    world = _world(jobs, policy, cluster, settings, pace_of(policy, model), pairs)
    engine = Engine(
        world,
        policy,
        shares=rules.max_group_size > 1 or packs,
        stops_jobs=rules.preemption and settings.checkpoints,
        interference=table,
        progress=progress,
    )
    return world, engine


def _world(
    jobs: Sequence[TraceJob], policy: Policy, cluster: Cluster, settings: Settings, pace: Pace, pairs: Pairs
) -> World:
    packs = policy.supports_packing
    nodes = PackedNodes(cluster) if packs else Nodes(cluster)
    sensitivities = sensitivities_of(jobs, cluster, nodes.hosts.fair)
    speeds = Speeds(pace, jobs, sensitivities, nodes.hosts.fair, pairs)
    waiting = WaitingJobs(view_of(policy))
    if isinstance(nodes, PackedNodes):
        crowding, elastic = crowding_of(settings, pairs), policy.elastic
        return PackedWorld(jobs, nodes, settings, speeds, waiting, crowding=crowding, elastic=elastic)
    return World(jobs, nodes, settings, speeds, waiting)


def _check_settings(settings: Settings, cluster: Cluster) -> None:
    for name in ("interval_s", "restart_s", "profiling_s"):
        value = getattr(settings, name)
        if not 0 <= value < math.inf:
            raise SimulationError(f"{name} is {value}; it must be a finite number of seconds ≥ 0")
    check_noise(settings)
    if settings.seed < 0:
        raise SimulationError(f"seed is {settings.seed}; it must be ≥ 0")
    check_cluster(cluster)
    for outage in settings.outages:
        if not 0 <= outage.node < cluster.node_count:
            raise SimulationError(f"outage of node {outage.node}: valid are 0 to {cluster.node_count - 1}")
        if not 0 <= outage.start_s < outage.end_s:
            raise SimulationError(
                f"outage of node {outage.node} from {outage.start_s} s to {outage.end_s} s; it must end after it starts"
            )


def _check_trace(trace: Trace, cluster: Cluster) -> None:
    check_sizes(trace, cluster)
    if len({job.job_id for job in trace.jobs}) != len(trace.jobs):
        raise SimulationError(f"trace {trace.name} has several jobs of one id; ids must be unique")
    for job in trace.jobs:
        _check_job(job, cluster)


def _check_job(job: TraceJob, cluster: Cluster) -> None:
    if not 0 <= job.submit_s < math.inf:
        raise SimulationError(f"job {job.job_id} is submitted at {job.submit_s} s; it must be finite and ≥ 0")
    if not 0 < job.service_s < math.inf:
        raise SimulationError(f"job {job.job_id} needs {job.service_s} s of service; it must be finite and > 0")
    needs_gib = job.mem_gib_in(job.batch.max_accumulate_steps if job.batch else 1)
    if cluster.gpu_mem_gib and needs_gib > cluster.gpu_mem_gib:
        raise SimulationError(
            f"job {job.job_id} needs {needs_gib} GiB of GPU memory, but each GPU has "
            f"{cluster.gpu_mem_gib} GiB; simulate larger GPUs, or leave the job out"
        )
