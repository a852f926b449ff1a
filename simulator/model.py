"""Input and result of a simulation: plain frozen records."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

from muri.errors import UsageError
from muri.policies.traits import BatchModel, PairSpeed, Sensitivity
from muri.profiler.records import ProfileKey, StageProfile


class SimulationError(UsageError):
    """A trace, a cluster or a setting that cannot be simulated."""


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job of a trace."""

    job_id: int  # Unique in the trace
    submit_s: float  # Seconds since the trace's start
    gpu_count: int  # GPUs of the whole job
    iterations: int  # Iterations that it trains for
    profile: StageProfile  # Stage times of one iteration, iteration time and GPU memory, running alone
    user: str = "user"  # Owner
    opportunistic: bool = False  # Whether the job only uses what others leave over (AntMan)
    # The duration that the trace states; None when it states none. Work is always iterations × iteration time
    listed_duration_s: float | None = None
    cpu_count: float | None = None  # CPUs asked for; None: in proportion to the GPUs
    mem_gib: float | None = None  # Host memory asked for; None: in proportion to the GPUs
    restart_s: float | None = None  # Seconds that a restart costs; None: the simulation's default
    sensitivity: Sensitivity | None = None  # Throughput over CPUs and host memory; None: derived from the profile
    # How iteration time and GPU memory follow from the batch size; None: the batch is never split
    batch: BatchModel | None = None
    # Share of its GPUs' time that it computes on them when alone, 0 to 1; None: as the profile says
    gpu_utilization: float | None = None

    @property
    def service_s(self) -> float:
        """Seconds that the job runs when alone and never stopped."""
        return self.iterations * self.profile.iteration_s

    @property
    def key(self) -> ProfileKey:
        """Model, batch size and GPUs that the profile is valid for."""
        return self.profile.key

    @property
    def gpu_share(self) -> float:
        """Share of its GPUs' time that the job computes on them when alone, 0 to 1."""
        if self.gpu_utilization is not None:
            return self.gpu_utilization
        return min(1.0, self.profile.propagate_s / self.profile.iteration_s)

    def mem_gib_in(self, accumulate_steps: int) -> float:
        """GPU memory that the job really needs when its batch is computed in this many steps; 0: unknown."""
        batch = self.batch
        if batch is not None and (batch.fixed_mem_gib or batch.mem_gib_per_sample):
            return batch.mem_gib(accumulate_steps)
        return self.profile.gpu_mem_gib


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs by submit time, then id."""

    name: str  # Short name, the file's stem
    jobs: tuple[TraceJob, ...]
    skipped_rows: int = 0  # Bad rows that were left out when it was read


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal nodes."""

    node_count: int
    gpus_per_node: int  # GPUs of each
    gpu_mem_gib: float = 0.0  # Memory of each GPU; 0: unlimited
    cpus_per_node: float = 0.0  # CPUs of each; 0: unlimited
    mem_gib_per_node: float = 0.0  # Host memory of each; 0: unlimited

    @property
    def gpu_count(self) -> int:
        """GPUs of the whole cluster."""
        return self.node_count * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class Outage:
    """A node that is away for a time."""

    node: int  # Index from 0
    start_s: float  # When the outage begins
    end_s: float  # When the node is back
    # Whether running jobs may finish first; otherwise they go back to the queue, and without checkpoints their progress
    # since the last start is lost
    drain: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """How to simulate."""

    model: str = "default"  # "default" is physically sound; `muri.simulator.run.simulation_model` knows the other names
    interval_s: float = 0.0  # Seconds between two plans; 0: at every arrival and completion
    restart_s: float = 30.0  # Seconds lost by a start, regrouping or move, for jobs that state none
    # n_p: stage times as planned with are the true ones × U[1 − n_p, 1 + n_p] (Muri, section 6.4)
    profile_noise: float = 0.0
    profiling_s: float = 0.0  # Seconds that the first job of each model waits for its dry run
    durations_known: bool = True  # Whether policies see remaining times
    outages: tuple[Outage, ...] = ()  # Node failures and drains
    seed: int = 0  # For noise
    # Whether jobs can resume from a checkpoint: only then may a policy stop them, and only then do they keep their
    # progress when a node fails
    checkpoints: bool = True
    # Measured speeds of pairs; those that are missing are estimated from the profiles
    interference: tuple[PairSpeed, ...] = ()
    # What slows jobs down on a shared GPU: "pairs", the speeds of pairs, or "utilization", Horus's function of their
    # total GPU utilization
    slowdown: Literal["pairs", "utilization"] = "pairs"
    # Whether jobs of different users may share GPUs, as in the papers; on a cluster they never do
    any_user: bool = False
    # Synergy's reference model stops when this many jobs, the first ones submitted, have ended, as its public simulator
    # does. None: all jobs
    until: int | None = None
    check: bool = False  # Whether to check every request and every step of the default model, and not only the end


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The course of one job."""

    job: TraceJob
    start_s: float  # First start, seconds since the trace's start
    end_s: float
    run_s: float = 0.0  # Seconds with GPUs
    restarts: int = 0  # Starts after the first, moves and regroupings
    shared_s: float = 0.0  # Of `run_s`, the seconds on shared GPUs
    out_of_memory: int = 0  # How often it failed because GPU memory was short

    @property
    def jct_s(self) -> float:
        """Job completion time: from submission to end."""
        return self.end_s - self.job.submit_s


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster from one event to the next."""

    start_s: float
    length_s: float
    pending: float  # Jobs that wait. Where samples were thinned, this and all that follow are time-weighted means
    blocking_index: float  # Mean over the waiting jobs of time waited / remaining time (Muri, section 6.1)
    gpus_held: float  # GPUs in use
    utilization: tuple[float, float, float, float]  # Share of the cluster's storage, CPU, GPU and network that is busy


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """One group's (or single job's) stay on its GPUs, for the timeline.

    Where jobs share GPUs one by one: the stay of just these jobs on some GPUs of one node.
    """

    start_s: float
    end_s: float
    members: tuple[int, ...]  # Job ids
    node: int  # Index of the first node
    gpu_count: int  # GPUs held


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a simulation."""

    policy: str
    trace: str
    settings: Settings  # How it was simulated
    cluster: Cluster
    records: tuple[JobRecord, ...]  # One for each job that has ended, by job id
    # The cluster over time; thinned to at most a few thousand, each with time-weighted means
    samples: tuple[Sample, ...] = ()
    spans: tuple[GroupSpan, ...] = ()  # The groups over time; empty unless asked for
    # Jobs that had not ended, in order of submission; none unless `until` made it stop early
    unfinished: tuple[TraceJob, ...] = ()
    # Wall-clock seconds of each plan. Only this field and `wall_s` differ from run to run
    decision_s: tuple[float, ...] = field(default=(), compare=False)
    wall_s: float = field(default=0.0, compare=False)  # Wall-clock seconds of the simulation


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulation to carry out; every model turns one into a `SimulationResult`."""

    trace: Trace
    policy: str
    cluster: Cluster
    settings: Settings
    options: Mapping[str, Any] = field(default_factory=dict)  # Policy options by name that the user chose
    # Called from time to time with the share of the jobs that have ended, 0 to 1
    progress: Callable[[float], None] | None = None
    with_spans: bool = False  # Whether the result lists which jobs shared GPUs, and when
    begin_s: float = field(default_factory=perf_counter)  # Time of `time.perf_counter` at its beginning

    def result(
        self,
        records: tuple[JobRecord, ...],
        samples: tuple[Sample, ...],
        spans: Iterable[GroupSpan],
        decision_s: Iterable[float],
        unfinished: tuple[TraceJob, ...] = (),
    ) -> SimulationResult:
        """The result; for the arguments see `SimulationResult`."""
        return SimulationResult(
            policy=self.policy,
            trace=self.trace.name,
            settings=self.settings,
            cluster=self.cluster,
            records=records,
            samples=samples,
            spans=tuple(spans),
            unfinished=unfinished,
            decision_s=tuple(decision_s),
            wall_s=perf_counter() - self.begin_s,
        )


@dataclass(frozen=True, slots=True)
class SimulationModel:
    """Another way to simulate, which a distribution offers in the entry point group `muri.simulation_models`."""

    simulate: Callable[[Simulation], SimulationResult]  # Carries out a simulation, or raises `SimulationError`
    # Called with a policy's name and options before the first simulation; refuses what the model does not know with a
    # `UsageError` that lists the valid names
    check: Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation of a sweep."""

    label: str  # Its name in tables: that of the policy, unless several variants of one policy are run
    trace: Trace
    policy: str
    cluster: Cluster
    settings: Settings  # How to simulate, seed included
    options: Mapping[str, Any] = field(default_factory=dict)  # Options of the policy
    first: int | None = None  # Index of the first job that the metrics count (steady state); None: from the first job
    last: int | None = None  # Index behind the last one; None: to the last job
    with_spans: bool = False  # Whether to record the timeline of the groups

    @property
    def name(self) -> str:
        """Its name among the runs of a sweep."""
        return f"{self.trace.name}, {self.label}"
