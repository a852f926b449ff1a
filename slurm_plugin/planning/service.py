"""GPU time that jobs had in earlier runs, whoever ended these: Muri, Slurm, an administrator, a failed node. Pure.

Orders by attained service (2D-LAS, Tiresias) count all of it. Slurm itself keeps the start of the present run only, so
the controller remembers runs: when they began, and their end once a job's restart count has grown. Runs that it never
saw, as when it was stopped for long, are looked up in the accounts.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from muri.slurm_plugin.planning.starts import as_asked
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.journal import PREEMPT, Intent
from muri.slurm_plugin.records.roles import ManagedJob, Role, View
from muri.slurm_plugin.records.usage import Run


@dataclass(frozen=True, slots=True)
class PastRun:
    """One run of a job.

    Attributes:
        number: Restart count of the job in this run.
        start_s: When it began, seconds since the epoch.
        gpu_count: GPUs that the job had, alone or together with others.
        end_s: When it ended; 0 while it goes on.
    """

    number: int
    start_s: float
    gpu_count: int
    end_s: float = 0.0

    @property
    def gpu_s(self) -> float:
        """GPU-seconds of a run that has ended."""
        return max(0.0, self.end_s - self.start_s) * self.gpu_count


@dataclass(frozen=True, slots=True)
class Service:
    """What is remembered of a job's runs.

    Attributes:
        runs: By number; the last one may go on.
        asked: Restart count of the job when the accounts were asked about it; 0: never.
        accounts_s: Seconds that all its ended runs had by the accounts then.
    """

    runs: tuple[PastRun, ...] = ()
    asked: int = 0
    accounts_s: float = 0.0

    @classmethod
    def of(cls, fact: Mapping[str, Any]) -> "Service":
        """Read the journal's fact.

        Raises:
            KeyError, TypeError, ValueError: It is damaged.
        """
        runs = (PastRun(int(run), float(start), int(gpus), float(end)) for run, start, gpus, end in fact["runs"])
        return cls(tuple(runs), int(fact["asked"]), float(fact["accounts_s"]))

    @property
    def fact(self) -> dict[str, Any]:
        """For the journal."""
        runs = [[run.number, run.start_s, run.gpu_count, run.end_s] for run in self.runs]
        return {"runs": runs, "asked": self.asked, "accounts_s": self.accounts_s}


def noted(known: Mapping[int, Service], view: View) -> dict[int, Service]:
    """Bring what is remembered up to what Slurm shows; jobs that have ended are forgotten.

    Args:
        known: As the last cycle left it, by job id.
        view: What Slurm shows now.
    """
    found: dict[int, Service] = {}
    for job, gpu_count in _users_jobs(view):
        service = known.get(job.job_id, Service())
        runs = [_ended(run, job) for run in service.runs if run.number <= job.restart_count]
        at_work = job.state in {JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING}
        if at_work and job.start_s and all(run.number != job.restart_count for run in runs):
            runs.append(PastRun(job.restart_count, job.start_s, gpu_count))
        if runs or service.asked:
            found[job.job_id] = replace(service, runs=tuple(runs))
    return found


def _users_jobs(view: View) -> Iterator[tuple[ManagedJob, int]]:
    """Jobs submitted with --muri that run or have run, with the GPUs that they asked for."""
    for role in (Role.CANDIDATE, Role.RELEASED, Role.MEMBER, Role.USER_HELD):
        for job in view.having(role):
            if job.state is JobState.PENDING and not job.restart_count:
                continue  # most of a long queue
            pilot = view.jobs.get(job.membership.pilot) if job.membership is not None else None
            gpu_count = pilot.gpu_count if pilot is not None else as_asked(job).gpu_count
            if gpu_count and not job.several_tasks:
                yield job, gpu_count


def _ended(run: PastRun, job: ManagedJob) -> PastRun:
    """A run with its end, where the job is past it: Slurm sets a job's submit time anew when it requeues it."""
    if run.end_s or run.number == job.restart_count:
        return run
    return replace(run, end_s=max(run.start_s, job.submit_s))


def gaps(known: Mapping[int, Service], view: View, intents: tuple[Intent, ...]) -> frozenset[int]:
    """Return the jobs of which a run is neither remembered nor in the accounts as they were last asked."""
    stops = _stopped_runs(intents)
    found = set()
    for job, _ in _users_jobs(view):
        service = known.get(job.job_id, Service())
        numbers = {run.number for run in service.runs} | stops.get(job.job_id, {}).keys()
        # After the accounts' last answer every run was seen, or they are asked again. (Counted, not listed: a damaged
        # record may speak of billions of runs.)
        seen = sum(service.asked <= number < job.restart_count for number in numbers)
        if seen < job.restart_count - service.asked:
            found.add(job.job_id)
    return frozenset(found)


def with_accounts(
    known: Mapping[int, Service], jobs: Iterable[int], runs: Iterable[Run], view: View
) -> dict[int, Service]:
    """Add what the accounts tell of some jobs; those that they do not know are not asked about again either.

    Args:
        known: What is remembered, by job id.
        jobs: Who was asked about.
        runs: What the accounts tell.
        view: What Slurm shows.
    """
    elapsed_s: dict[int, float] = {}
    for run in runs:
        if run.has_ended:
            elapsed_s[run.job_id] = elapsed_s.get(run.job_id, 0.0) + run.elapsed_s
    asked = {
        job_id: replace(
            known.get(job_id, Service()), asked=view.jobs[job_id].restart_count, accounts_s=elapsed_s.get(job_id, 0.0)
        )
        for job_id in jobs
    }
    return {**known, **asked}


def served_gpu_s(known: Mapping[int, Service], view: View, intents: tuple[Intent, ...]) -> dict[int, float]:
    """Return the GPU-seconds that jobs had in earlier runs, by job id; each run counts once.

    What the present run has had is not in it.

    Args:
        known: What `noted` returned for this view.
        view: What Slurm shows.
        intents: The journal's entries: Muri's own stops tell of runs, too.
    """
    stops = _stopped_runs(intents)
    served: dict[int, float] = {}
    for job, gpu_count in _users_jobs(view):
        service = known.get(job.job_id, Service())
        by_run = {number: gpu_s for number, gpu_s in stops.get(job.job_id, {}).items() if number < job.restart_count}
        for run in service.runs:
            if run.end_s:
                by_run[run.number] = max(run.gpu_s, by_run.get(run.number, 0.0))
        since = sum(gpu_s for number, gpu_s in by_run.items() if number >= service.asked)
        # The accounts hold every run until they were asked, the remembered ones among them. Their record of the last
        # one may have come too late.
        before = max(service.accounts_s * gpu_count, sum(by_run.values()) - since)
        if before + since > 0:
            served[job.job_id] = before + since
    return served


def had_before(gpu_s: float) -> str:
    """Say for people how much service a job has had in earlier runs."""
    minutes = gpu_s / 60
    return (
        f"earlier runs have had {minutes:.1f} GPU minutes"
        if minutes < 60
        else (f"earlier runs have had {minutes / 60:.1f} GPU hours")
    )


def saved_gpu_s(view: View, intents: tuple[Intent, ...]) -> dict[int, float]:
    """Return the GPU-seconds of runs that ended with a checkpoint because Muri stopped them, by job id.

    A run that Slurm ended may have to be repeated: of a job's duration it takes nothing off.
    """
    found: dict[int, float] = {}
    for job_id, by_run in _stopped_runs(intents).items():
        job = view.jobs.get(job_id)
        if job is not None:
            found[job_id] = sum(gpu_s for number, gpu_s in by_run.items() if number < job.restart_count)
    return found


def _stopped_runs(intents: tuple[Intent, ...]) -> dict[int, dict[int, float]]:
    """GPU-seconds of the runs that the controller stopped, by job id and number of the run."""
    found: dict[int, dict[int, float]] = {}
    for intent in intents:
        if intent.kind == PREEMPT and intent.state != "abandoned":
            told = intent.payload
            found.setdefault(int(told["job_id"]), {})[int(told["run"])] = float(told["served_gpu_s"])
    return found
