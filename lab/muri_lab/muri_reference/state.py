"""A trace as arrays, with the public simulator's units and rounding; what each job has received; free GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from muri.policies.speed import Floats, Indices, Shape
from muri.profiler.records import StageProfile
from muri.simulator.model import Cluster, Trace, TraceJob

RUN_TIME_FACTOR: Final = 1.015  # What every job's own iteration time is multiplied by (jobs.py, itertime_overhead_list)
SAME_TIME: Final = 1e-9  # Events nearer than this, relative to their time, are one (util.py, search_dict_list)
SAME_TIME_S: Final = 1e-4
"""Under Muri and AntMan an arrival and a completion nearer than this are one event (run_sim.py)."""

TIRESIAS_LIMITS_GPU_S: Final = (3250.0, 7200.0)
"""Attained GPU-seconds at which a job leaves Tiresias' first and second queue (jobs.py, queue_limit)."""

UNLISTED_RESTART_S: Final = 10.0  # Overhead of a model that is not in the table
_GPU_COUNTS: Final = (1, 2, 4, 8, 16, 32)

_OVERHEADS: Final[Mapping[str, tuple[float, ...]]] = {
    "vgg16": (7, 7, 8, 9, 9, 10),
    "vgg19": (7, 7, 8, 9, 10, 10),
    "resnet18": (4, 5, 5, 7, 7, 7),
    "shufflenet_v2_x1_0": (4, 4, 5, 5, 7, 8),
    "bert": (10, 10, 10, 10, 10, 10),
    "gpt2": (10, 10, 10, 10, 10, 10),
    "a2c": (38, 39, 39, 46, 46, 46),
    "dqn": (5, 5, 6, 6, 8, 8),
}

Flags = NDArray[np.bool_]

_DIGITS_MS = 6
"""Digits after a millisecond that a trace can have. The simulator computes in milliseconds; seconds that were divided
by 1,000 and multiplied again would differ in the last bit, which decides ties.
"""


def restart_overhead_s(model: str, gpu_count: int) -> float:
    """Seconds that every event costs a running job (run_sim.py, overhead_dict)."""
    row = _OVERHEADS.get(model)
    if row is None:
        return UNLISTED_RESTART_S
    return float(max((listed, cost) for listed, cost in zip(_GPU_COUNTS, row, strict=True) if listed <= gpu_count)[1])


@dataclass(frozen=True, slots=True)
class JobTable:
    """The jobs of a trace by submit time; rows of all arrays are jobs."""

    jobs: tuple[TraceJob, ...]  # The jobs themselves
    submit_s: Floats  # Submit time
    gpus: Indices  # GPUs of each
    iterations: Floats  # Iterations of each
    iteration_s: Floats  # Seconds of an iteration alone, with the simulator's factor
    listed_s: Floats  # The duration that the trace states, or that of the work where it states none
    overhead_s: Floats  # cost of an event while the job runs
    opportunistic: Flags  # AntMan's second class
    resource_s: Floats  # Array (n, 3): seconds per iteration of load with preprocess, of propagate and of synchronize
    kind: Indices  # Index into `shapes`
    shapes: tuple[Shape, ...]  # The distinct profiles, or those of the jobs; load holds load and preprocess together
    planned: tuple[Shape, ...]  # What policies take them for: the same, unless profiles are noisy

    def __len__(self) -> int:
        """How many jobs there are."""
        return len(self.jobs)


def job_table(trace: Trace, noise: float = 0.0, seed: int = 0, *, once_a_profile: bool = False) -> JobTable:
    """Lay out a trace as arrays."""
    jobs = tuple(sorted(trace.jobs, key=lambda job: job.submit_s))
    shapes = [_shape(job.profile) for job in jobs]
    by_job = noise > 0 and not once_a_profile
    distinct = tuple(shapes if by_job else sorted(set(shapes)))
    place = {shape: index for index, shape in enumerate(distinct)}
    kind = range(len(jobs)) if by_job else [place[shape] for shape in shapes]
    resource_s = np.array([(shape.stage_s[0], *shape.stage_s[2:]) for shape in shapes]).reshape(-1, 3)
    iteration_s = np.array([_ms(job.profile.iteration_s) * RUN_TIME_FACTOR / 1000 for job in jobs])
    iterations = np.array([float(job.iterations) for job in jobs])
    listed = [job.listed_duration_s for job in jobs]
    work_s = (iterations * iteration_s).tolist()
    return JobTable(
        jobs=jobs,
        submit_s=np.array([job.submit_s for job in jobs]),
        gpus=np.array([job.gpu_count for job in jobs], dtype=np.intp),
        iterations=iterations,
        iteration_s=iteration_s,
        listed_s=np.array([work if given is None else given for given, work in zip(listed, work_s, strict=True)]),
        overhead_s=np.array([_overhead_s(job) for job in jobs]),
        opportunistic=np.array([job.opportunistic for job in jobs], dtype=np.bool_),
        resource_s=resource_s,
        kind=np.array(kind, dtype=np.intp),
        shapes=distinct,
        planned=distinct
        if noise <= 0
        else tuple(_noisy(shape, noise, seed, index) for index, shape in enumerate(distinct)),
    )


def _overhead_s(job: TraceJob) -> float:
    return restart_overhead_s(job.key.model, job.gpu_count) if job.restart_s is None else job.restart_s


def _ms(seconds: float) -> float:
    return round(seconds * 1000, _DIGITS_MS)


def _shape(profile: StageProfile) -> Shape:
    """Load and preprocess as one, everything a whole number of nanoseconds."""
    loaded = _ms(profile.load_s + profile.preprocess_s) / 1000
    stages = (loaded, 0.0, _ms(profile.propagate_s) / 1000, _ms(profile.synchronize_s) / 1000)
    return Shape(stages, _ms(profile.iteration_s) / 1000, 0.0, profile.key.model)


def _noisy(shape: Shape, noise: float, seed: int, index: int) -> Shape:
    factors = np.random.default_rng((seed, index)).uniform(1.0 - noise, 1.0 + noise, len(shape.stage_s)).tolist()
    stages = tuple(stage_s * factor for stage_s, factor in zip(shape.stage_s, factors, strict=True))
    stretch = sum(stages) / (sum(shape.stage_s) or 1.0)
    return Shape(stages, shape.iteration_s * stretch, 0.0, shape.model) if stretch > 0 else shape


@dataclass(slots=True)
class Ledger:
    """Progress of all jobs; rows are those of the job table."""

    table: JobTable  # The jobs
    now_s: float  # Time of the last event
    queue: Indices  # rows of jobs in the system in the last plan's order, which breaks the next plan's ties
    running: Flags  # Whether the job runs
    left: Floats  # Iterations left
    period_s: Floats  # Present seconds per iteration of running jobs
    overhead_s: Floats  # What the next event costs running jobs
    received_s: Floats  # Seconds of having run, whatever was achieved in them
    waited_s: Floats  # Seconds of having waited
    start_s: Floats  # First start; NaN before
    end_s: Floats  # End; NaN before
    starts: Indices  # How many times the job was started
    regroups: Indices  # How many times it went on in another company
    shared_s: Floats  # Of the seconds received, those in a group
    shares: Flags  # Whether the job is in a group
    node: Indices  # First node of running jobs
    gpus_held: int = 0  # GPUs in use, shared ones counted once; set by the policy
    group: dict[int, tuple[int, ...]] = field(default_factory=dict)  # row of a job that shares GPUs → rows of its group
    _ran_before: Flags = field(default_factory=lambda: np.empty(0, dtype=np.bool_))

    @classmethod
    def of(cls, table: JobTable) -> "Ledger":
        """The ledger before the first arrival."""
        count = len(table)
        zeros = [np.zeros(count) for _ in range(3)]
        return cls(
            table=table,
            now_s=0.0,
            queue=np.empty(0, dtype=np.intp),
            running=np.zeros(count, dtype=np.bool_),
            left=table.iterations.copy(),
            period_s=table.iteration_s.copy(),
            overhead_s=table.overhead_s.copy(),
            received_s=zeros[0],
            waited_s=zeros[1],
            start_s=np.full(count, np.nan),
            end_s=np.full(count, np.nan),
            starts=np.zeros(count, dtype=np.intp),
            regroups=np.zeros(count, dtype=np.intp),
            shared_s=zeros[2],
            shares=np.zeros(count, dtype=np.bool_),
            node=np.zeros(count, dtype=np.intp),
        )

    @property
    def remaining_s(self) -> Floats:
        """Seconds of service that each job in the queue still needs, alone; in the order of the queue."""
        return np.asarray(self.left[self.queue] * self.table.iteration_s[self.queue])

    def on(self) -> Indices:
        """The running jobs in the order of the queue."""
        return self.queue[self.running[self.queue]]

    def leave(self, jobs: Sequence[int], now_s: float) -> None:
        """Some jobs end."""
        self._account(np.asarray(jobs, dtype=np.intp), now_s)
        self.end_s[jobs] = now_s
        self.running[jobs] = False
        self.shares[jobs] = False
        self.queue = self.queue[~np.isin(self.queue, jobs)]

    def arrive(self, jobs: Sequence[int]) -> None:
        """Some jobs enter the queue, at its end."""
        self.queue = np.concatenate([self.queue, np.asarray(jobs, dtype=np.intp)])

    def advance(self, now_s: float) -> None:
        """Let all running jobs progress until now; each event costs each of them its overhead, moved or not."""
        on = self.on()
        gained_s = np.maximum(now_s - self.now_s - self.overhead_s[on], 0.0)
        self.left[on] -= gained_s / self.period_s[on]
        self._account(on, now_s)
        off = self.queue[~self.running[self.queue]]
        self.waited_s[off] += now_s - np.maximum(self.now_s, self.table.submit_s[off])
        self.now_s = now_s

    def _account(self, on: Indices, now_s: float) -> None:
        # The simulator adds the time and takes the last event's away again; in another order the last bit differs.
        self.received_s[on] = self.received_s[on] + now_s - self.now_s
        self.shared_s[on[self.shares[on]]] += now_s - self.now_s

    def run_only(self, jobs: Sequence[int], nodes: Sequence[int] | None = None) -> None:
        """From now on these jobs run, and no others."""
        if nodes is not None:
            self.node[jobs] = nodes
        self._ran_before = self.running
        self.running = np.zeros(len(self.running), dtype=np.bool_)
        self.running[jobs] = True
        started = np.flatnonzero(self.running & ~self._ran_before)
        self.starts[started] += 1
        first = started[np.isnan(self.start_s[started])]
        self.start_s[first] = self.now_s

    def share(self, group: dict[int, tuple[int, ...]]) -> None:
        """From now on these jobs share GPUs, and no others; called after `run_only`."""
        stayed = (self._ran_before & self.running).tolist()
        before = self.group
        others = [job for job, members in group.items() if stayed[job] and before.get(job) != members]
        others += [job for job in before if stayed[job] and job not in group]
        self.regroups[others] += 1
        self.group = group
        self.shares = np.zeros(len(self.running), dtype=np.bool_)
        self.shares[list(group)] = True


@dataclass(slots=True)
class FreeNodes:
    """Free GPUs of each node while one plan is made."""

    size: int  # GPUs of a node
    free: list[int]  # Free GPUs, by node
    _refused: int = field(default=1 << 30)

    @classmethod
    def of(cls, cluster: Cluster) -> "FreeNodes":
        """An empty cluster."""
        return cls(cluster.gpus_per_node, [cluster.gpus_per_node] * cluster.node_count)

    def take(self, gpus: int) -> int:
        """Give out GPUs of one node, or of whole nodes and the rest on another; return the first node or -1."""
        if gpus >= self._refused:  # nothing is given back within a plan
            return -1
        node = self._take_within(gpus) if gpus <= self.size else self._take_across(gpus)
        if node < 0 and gpus <= self.size:
            self._refused = min(self._refused, gpus)
        return node

    @property
    def full(self) -> bool:
        """Whether not even a job of one GPU would fit."""
        return self._refused == 1

    def _take_within(self, gpus: int) -> int:
        for node, free in enumerate(self.free):
            if free >= gpus:
                self.free[node] = free - gpus
                return node
        return -1

    def _take_across(self, gpus: int) -> int:
        whole, rest = divmod(gpus, self.size)
        idle = [node for node, free in enumerate(self.free) if free == self.size][:whole]
        if len(idle) < whole:
            return -1
        last = next((node for node, free in enumerate(self.free) if free >= rest and node not in idle), -1)
        if rest and last < 0:
            return -1
        for node in idle:
            self.free[node] = 0
        if rest:
            self.free[last] -= rest
        return idle[0]
