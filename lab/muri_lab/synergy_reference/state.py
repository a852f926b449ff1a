"""The jobs of a trace as Synergy's public simulator sees them, and the progress of each."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from muri.policies.speed import Floats
from muri.simulator.model import Cluster, JobRecord, SimulationError, Trace, TraceJob
from muri.simulator.traces.models import SynergyFigures, synergy_figures

Rows = npt.NDArray[np.int64]

ROUND_S: Final = 300  # Seconds from one plan to the next


class Share(NamedTuple):
    """CPUs and host memory for each GPU."""

    cpus: float
    mem_gib: float

    def exceeds(self, other: "Share") -> bool:
        """Whether it has more of either."""
        return self.cpus > other.cpus or self.mem_gib > other.mem_gib


@dataclass(frozen=True, slots=True)
class Kind:
    """Common properties of the jobs of one model and GPU count."""

    gpu_count: int  # GPUs of each job
    demand: Share  # What each GPU asks for
    speed: float  # Iterations per second with the demand, relative to the fair share
    fair_speed: float = 1.0  # iterations/s with the fair share, relative to 3 CPUs and 62.5 GiB


@dataclass(frozen=True)
class JobTable:
    """Jobs by row, in order of submission."""

    jobs: tuple[TraceJob, ...]  # The jobs
    fair: Share  # Each GPU's proportional share of a node
    kinds: tuple[Kind, ...]  # The kind of each

    @cached_property
    def submit_s(self) -> Floats:
        """When each arrives."""
        return np.array([job.submit_s for job in self.jobs], dtype=np.float64)

    @cached_property
    def gpus(self) -> Rows:
        """GPUs of each."""
        return np.array([job.gpu_count for job in self.jobs], dtype=np.int64)

    @cached_property
    def iterations(self) -> Rows:
        """Iterations of each."""
        return np.array([job.iterations for job in self.jobs], dtype=np.int64)

    @cached_property
    def iteration_s(self) -> Floats:
        """Seconds of an iteration with the fair share."""
        measured = [job.profile.iteration_s for job in self.jobs]
        return np.array(measured, dtype=np.float64) / [kind.fair_speed for kind in self.kinds]

    @cached_property
    def speed(self) -> Floats:
        """Speed of each with its demand."""
        return np.array([kind.speed for kind in self.kinds], dtype=np.float64)

    @cached_property
    def fair_steps(self) -> Rows:
        """Iterations in a round with the fair share; an unfinished one is lost."""
        return np.floor(ROUND_S / self.iteration_s).astype(np.int64)

    @cached_property
    def best_steps(self) -> Rows:
        """Iterations in a round with the demand."""
        return np.floor(ROUND_S / (self.iteration_s / self.speed)).astype(np.int64)


def job_table(trace: Trace, cluster: Cluster, *, by_demand: bool) -> JobTable:
    """The jobs of a trace."""
    fair = Share(cluster.cpus_per_node / cluster.gpus_per_node, cluster.mem_gib_per_node / cluster.gpus_per_node)
    jobs = tuple(sorted(trace.jobs, key=lambda job: (job.submit_s, job.job_id)))
    known: dict[tuple[str, int], Kind] = {}
    for job in jobs:
        _check(job)
        name = (job.key.model, job.gpu_count)
        if name not in known:
            figures = synergy_figures()[job.key.model]
            fair_speed = figures.sensitivity.throughput_at(*fair)
            kind = _kind(figures, job.gpu_count, cluster, fair) if by_demand else Kind(job.gpu_count, fair, 1.0)
            known[name] = replace(kind, fair_speed=fair_speed)
    return JobTable(jobs, fair, tuple(known[job.key.model, job.gpu_count] for job in jobs))


def _check(job: TraceJob) -> None:
    if job.key.model not in synergy_figures():
        valid = ", ".join(synergy_figures())
        raise SimulationError(
            f"job {job.job_id}: Synergy's public simulator has no figures of model {job.key.model!r}; "
            f"its models are: {valid}. For other models use the default model"
        )
    if job.profile.iteration_s > ROUND_S:
        raise SimulationError(
            f"job {job.job_id}: an iteration takes {job.profile.iteration_s} s, longer than a round of {ROUND_S} s; "
            "in the reference model it would never end"
        )
    if not 0 <= job.submit_s < math.inf:
        raise SimulationError(f"job {job.job_id} is submitted at {job.submit_s} s; it must be finite and ≥ 0")


def _kind(figures: SynergyFigures, gpu_count: int, cluster: Cluster, fair: Share) -> Kind:
    """A job's demand, cut down to one node; the speed falls in a straight line with the CPUs."""
    wanted = figures.sensitivity.demand
    speedup = figures.speedup / figures.sensitivity.throughput_at(*fair)
    ideal = (wanted.cpus * gpu_count, wanted.mem_gib * gpu_count)
    limits = (cluster.cpus_per_node, cluster.mem_gib_per_node)
    if all(amount <= limit for amount, limit in zip(ideal, limits, strict=True)):
        return Kind(gpu_count, Share(wanted.cpus, wanted.mem_gib), speedup)
    if gpu_count > cluster.gpus_per_node:
        shares = (fair.cpus * gpu_count, fair.mem_gib * gpu_count)
        parts = zip(ideal, limits, shares, strict=True)
        cpus, mem_gib = (share if amount > limit else amount for amount, limit, share in parts)
        return Kind(gpu_count, Share(cpus / gpu_count, mem_gib / gpu_count), 1.0)
    cpus, mem_gib = map(min, ideal, limits)
    fair_cpus = fair.cpus * gpu_count
    # Where only memory is cut and more CPUs were not asked for, the public code stops; its gain is unknown.
    gained = (cpus - fair_cpus) / (ideal[0] - fair_cpus) if ideal[0] > fair_cpus else 0.0
    return Kind(gpu_count, Share(cpus / gpu_count, mem_gib / gpu_count), 1 + (speedup - 1) * gained)


@dataclass
class Ledger:
    """Arrays by row of the table; times in seconds."""

    table: JobTable  # The jobs
    left: Rows = field(init=False)  # Iterations to go
    speed: Floats = field(init=False)  # As of the last round: with the demand, unless the job was cut to its fair share
    rounds: Rows = field(init=False)  # Rounds in which it ran
    starts: Rows = field(init=False)  # Starts, the first included
    start_s: Floats = field(init=False)  # First start; not a number before it
    end_s: Floats = field(init=False)  # End; not a number before it
    seen_s: Floats = field(init=False)  # End of its last round; before the first, its arrival
    urgent: npt.NDArray[np.bool_] = field(init=False)  # Whether it goes first for good, having waited too long

    def __post_init__(self) -> None:
        """Fill the arrays as before the first round."""
        count = len(self.table.jobs)
        self.left = self.table.iterations.copy()
        self.speed = self.table.speed.copy()
        self.rounds = np.zeros(count, dtype=np.int64)
        self.starts = np.zeros(count, dtype=np.int64)
        self.start_s = np.full(count, np.nan)
        self.end_s = np.full(count, np.nan)
        self.seen_s = self.table.submit_s.copy()
        self.urgent = np.zeros(count, dtype=np.bool_)

    def run_round(self, now_s: float, queue: Rows, rows: Rows, speeds: Floats) -> Rows:
        """Let jobs run for one round; return the rows of those that ended."""
        first = self.rounds[rows] == 0
        self.starts[rows] += first | (self.seen_s[rows] != now_s)
        self.start_s[rows[first]] = now_s
        self.rounds[rows] += 1
        self.seen_s[rows] = now_s + ROUND_S
        self.speed[queue] = self.table.speed[queue]
        self.speed[rows] = speeds
        left = self.left[rows] - np.where(speeds == 1.0, self.table.fair_steps[rows], self.table.best_steps[rows])
        self.left[rows] = left
        ended = left <= 0
        done = rows[ended]
        self.end_s[done] = now_s + ROUND_S
        return done

    def records(self) -> tuple[JobRecord, ...]:
        """One for each job that has ended, by job id."""
        rows = np.flatnonzero(~np.isnan(self.end_s)).tolist()
        return tuple(sorted(map(self._record, rows), key=lambda record: record.job.job_id))

    def unfinished(self) -> tuple[TraceJob, ...]:
        """The other jobs, in order of submission."""
        return tuple(self.table.jobs[row] for row in np.flatnonzero(np.isnan(self.end_s)).tolist())

    def _record(self, row: int) -> JobRecord:
        return JobRecord(
            job=self.table.jobs[row],
            start_s=float(self.start_s[row]),
            end_s=float(self.end_s[row]),
            run_s=float(self.rounds[row] * ROUND_S),
            restarts=int(self.starts[row]) - 1,
        )
