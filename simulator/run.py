"""Simulate a trace under a policy, and several such runs one after the other or in parallel processes."""

import math
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import entry_points
from multiprocessing.queues import Queue
from queue import Empty
from typing import Any, Final

from muri.errors import MuriError
from muri.policies.lockstep import speed_model
from muri.policies.options import PolicyOptions
from muri.policies.registry import get_policy
from muri.policies.schedulers import QueuePolicy
from muri.policies.types import Policy
from muri.pythons import THE_LAB
from muri.simulator.engine.checks import check_cluster, check_noise, check_records, check_sizes
from muri.simulator.engine.jobs import WaitingJobs, view_of
from muri.simulator.engine.loop import Engine
from muri.simulator.engine.nodes import Nodes
from muri.simulator.engine.pace import Pace, Pairs, Speeds, pace_of, sensitivities_of
from muri.simulator.engine.packing import PackedNodes, PackedWorld, crowding_of
from muri.simulator.engine.world import World
from muri.simulator.metrics import Outcome, metrics_of
from muri.simulator.model import (
    Cluster,
    Run,
    Settings,
    Simulation,
    SimulationError,
    SimulationModel,
    SimulationResult,
    Trace,
    TraceJob,
)

MODELS_GROUP: Final = "muri.simulation_models"
"""Entry points of other distributions' models: each names a `SimulationModel`."""

_MODELS_OF_THE_LAB: Final = ("live", "reference")


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

    The same arguments give the same result, byte for byte, except for the two wall-clock fields.

    Under the default model a job's first start costs nothing beyond its service time; a later start, a move and a
    regrouping cost its restart time, during which it holds GPUs without progress. A dry run holds no GPUs of the
    cluster. GPU memory limits groups. CPUs and host memory are held in proportion to GPUs. A plan
    may give out other shares; then they make jobs faster or slower.

    Args:
        trace: The jobs.
        policy_name: One of `muri.policies.registry.policy_names`; another model may have its own.
        cluster: The nodes.
        settings: How to simulate.
        options: Policy options by name. Unlike on a cluster, `max_wait_s` is infinite unless it is given, and plans
            carry no certificate of optimality.
        progress: Called from time to time with the share of the jobs that have ended, 0 to 1.
        with_spans: Whether the result lists which jobs shared GPUs, and when.

    Raises:
        SimulationError: The trace cannot run on the cluster, or a setting is wrong.
        muri.policies.registry.UnknownPolicyError: Lists the policies there are.
        muri.policies.options.OptionsError: An option is unknown, wrong, or contradicts the policy.
    """
    task = Simulation(trace, policy_name, cluster, settings, options or {}, progress, with_spans)
    return _simulate_cluster(task) if settings.model == "default" else simulation_model(settings.model).simulate(task)


def simulation_model(name: str) -> SimulationModel:
    """Return a model of another distribution (SimulationError: no installed distribution offers it)."""
    offers = {offer.name: offer for offer in entry_points(group=MODELS_GROUP)}
    if name in offers:
        model: SimulationModel = offers[name].load()
        return model
    if name in _MODELS_OF_THE_LAB:
        raise SimulationError(f"the model {name} is in Muri's lab: {THE_LAB}")
    raise SimulationError(f"there is no model {name!r}; valid are: {', '.join(('default', *sorted(offers)))}")


def _simulate_cluster(task: Simulation) -> SimulationResult:
    """The default model: Slurm's cluster with intervals, restarts and placement."""
    jobs = task.trace.jobs
    _check_settings(task.settings, task.cluster)
    _check_trace(task.trace, task.cluster)
    policy = get_policy(task.policy, {"max_wait_s": math.inf, "certify": False, **task.options})
    world, engine = _prepare(task, policy)
    world.spans = [] if task.with_spans else None
    engine.run(jobs)
    records = tuple(sorted(world.records, key=lambda record: record.job.job_id))
    check_records(jobs, records)
    return task.result(records, world.meter.samples(), world.spans or (), engine.decision_s)


def _prepare(task: Simulation, policy: Policy) -> tuple[World, Engine]:
    settings, jobs = task.settings, task.trace.jobs
    rules = policy.rules if isinstance(policy, QueuePolicy) else PolicyOptions()
    if rules.speed_model == "measured" and not settings.interference:
        raise SimulationError(
            f"policy {policy.name} has the speed model 'measured', which needs measured pairs: give a table with "
            "--interference, or take speed_model=lockstep or speed_model=fair"
        )
    packs, pairs = policy.supports_packing, Pairs(settings.interference, jobs)
    table = pairs.table if packs or policy.plain_groups or settings.interference else None
    # Also made here, so that a model without its table is refused before the simulation starts.
    model = speed_model(rules.speed_model, ordering=rules.ordering, table=table)
    world = _world(jobs, policy, task.cluster, settings, pace_of(policy, model), pairs)
    engine = Engine(
        world,
        policy,
        shares=rules.max_group_size > 1 or packs,
        stops_jobs=rules.preemption and settings.checkpoints,
        interference=table,
        progress=task.progress,
    )
    return world, engine


def _world(
    jobs: Sequence[TraceJob], policy: Policy, cluster: Cluster, settings: Settings, pace: Pace, pairs: Pairs
) -> World:
    packs = policy.supports_packing
    nodes = PackedNodes(cluster) if packs else Nodes(cluster)
    sensitivities = sensitivities_of(jobs, cluster, nodes.hosts.fair)
    speeds = Speeds(pace, jobs, sensitivities, nodes.hosts.fair, pairs)
    waiting = WaitingJobs(view_of(policy, checkpoints=settings.checkpoints), any_user=settings.any_user)
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


def check_policies(model: str, options: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse unknown policies and options before the first simulation starts (UsageError: lists the valid names)."""
    check: Callable[[str, Mapping[str, Any]], object] = (
        get_policy if model == "default" else simulation_model(model).check
    )
    for name, chosen in options.items():
        check(name, chosen)


Watch = Callable[[int, float], None]
"""Called with the index of a run and the share of it that is done, 0 to 1."""

_POLL_S: Final = 0.2
_REPORT_EVERY_S: Final = 0.1
_END_WITHIN_S: Final = 10.0


class SweepError(MuriError):
    """A run of a sweep could not be carried out."""


def run_one(run: Run, progress: Callable[[float], None] | None = None) -> Outcome:
    """Carry out one run in this process."""
    result = simulate(
        run.trace,
        run.policy,
        run.cluster,
        run.settings,
        options=run.options,
        progress=progress,
        with_spans=run.with_spans,
    )
    return Outcome(run, result, metrics_of(result, run.first, run.last))


def sweep(runs: Sequence[Run], processes: int = 1, watch: Watch | None = None) -> tuple[Outcome, ...]:
    """Carry out all runs.

    Raises:
        SweepError: A process was killed from outside.
        MuriError: A run refused its input; where there are several, the text begins with its name.
    """
    watch = watch or _ignore
    if len(runs) == 1:
        return (_watched(runs[0], 0, watch),)
    if processes <= 1:
        return tuple(_named(run, partial(_watched, run, index, watch)) for index, run in enumerate(runs))
    return _sweep_in_processes(runs, min(processes, len(runs)), watch)


def _ignore(index: int, share: float) -> None:
    pass


def _named(run: Run, work: Callable[[], Outcome]) -> Outcome:
    """Carry out one run of several; an error tells which one it was."""
    try:
        return work()
    except MuriError as error:
        error.args = (f"{run.name}: {error}", *error.args[1:])
        raise
    except Exception as error:
        error.add_note(f"in the simulation of {run.name}, seed {run.settings.seed}")
        raise


def _watched(run: Run, index: int, watch: Watch) -> Outcome:
    outcome = run_one(run, lambda share: watch(index, share))
    watch(index, 1.0)
    return outcome


def _sweep_in_processes(runs: Sequence[Run], processes: int, watch: Watch) -> tuple[Outcome, ...]:
    # A forked child would inherit threads and locks in an unknown state; a spawned one starts clean.
    context = multiprocessing.get_context("spawn")
    reports: Queue[tuple[int, float]] = context.Queue()
    pool = ProcessPoolExecutor(processes, context, _prepare_worker, (reports,))
    with _cleared_away(pool):
        futures = [pool.submit(_work, index, run) for index, run in enumerate(runs)]
        for index, share in _reports_until_done(futures, reports):
            watch(index, share)
        try:
            return tuple(future.result() for future in futures)
        except BrokenProcessPool as error:
            raise SweepError(
                "a simulation's process was killed, most likely because memory ran out; try fewer --jobs"
            ) from error


@contextmanager
def _cleared_away(pool: ProcessPoolExecutor) -> Iterator[None]:
    """End all workers when the caller is interrupted or a run fails."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        children = set(multiprocessing.active_children()) - before
        for child in children:
            child.terminate()
        for child in children:
            child.join(_END_WITHIN_S)
        raise
    pool.shutdown()


def _reports_until_done(
    futures: Sequence[Future[Outcome]], reports: "Queue[tuple[int, float]]"
) -> Iterator[tuple[int, float]]:
    """Yield what the workers report until all runs have ended or one has failed."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, timeout=_POLL_S)
        with suppress(Empty):
            while True:
                yield reports.get_nowait()
        yield from ((futures.index(future), 1.0) for future in done)
        if any(future.exception() is not None for future in done):
            return


_worker_reports: "list[Queue[tuple[int, float]]]" = []
"""The queue to the parent, in a worker process: an initializer can only leave it in the module."""


def _prepare_worker(reports: "Queue[tuple[int, float]]") -> None:
    _worker_reports.append(reports)
    # The parent handles Ctrl-C and ends its workers; tracebacks of the workers would only be noise.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _work(index: int, run: Run) -> Outcome:
    sent_s = 0.0

    def report(share: float) -> None:
        nonlocal sent_s
        now_s = time.monotonic()
        if now_s - sent_s >= _REPORT_EVERY_S:
            sent_s = now_s
            _worker_reports[0].put((index, share))

    return _named(run, partial(run_one, run, report))


@contextmanager
def progress_bar(names: list[str], *, shown: bool) -> Iterator[Watch]:
    """A progress bar on stderr, with the time that is left, as the `watch` of a sweep."""
    if not shown or not sys.stderr.isatty():
        yield lambda index, share: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    shares = [0.0] * len(names)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(names[0], total=float(len(names)))

        def watch(index: int, share: float) -> None:
            shares[index] = max(shares[index], min(1.0, share))
            done = sum(one == 1.0 for one in shares)
            description = f"{names[index]} ({done} of {len(names)} done)" if len(names) > 1 else names[index]
            progress.update(task, completed=sum(shares), description=description)

        yield watch
