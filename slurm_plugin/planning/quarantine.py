"""A fault costs one job: finds the jobs, intents and profiles with which a decision raises, and decides without. Pure.

Deciding changes nothing, so it can be tried again with parts of its input left out. What is at fault is found by
bisection, whatever raised and wherever. A job of Muri's that is left out keeps its record, so that a pilot whose
comment is at fault still counts as running; only its comments go unread.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from muri.profiler.records import ProfileKey
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.records.roles import Role, View, unread

log = logging.getLogger("muri.controller")

_FAULTS_OF_A_USER: Final = 3
"""After so many faulty jobs of one user, the rest of that user's jobs are left out at once."""

_MOST_SEARCHES: Final = 30
"""Each costs about as many decisions as the logarithm of the queue's length."""

_Subject = int | str | ProfileKey
"""A job, an intent's token, a profile."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Quarantine:
    """What a decision was made without.

    Attributes:
        jobs: Why jobs were left out, by job id.
        intents: Why intents were left out, by token.
        profiles: Why profiles were left out.
    """

    jobs: Mapping[int, str] = field(default_factory=dict)
    intents: Mapping[str, str] = field(default_factory=dict)
    profiles: Mapping[ProfileKey, str] = field(default_factory=dict)

    def faults(self, view: View) -> tuple[str, ...]:
        """Everything that was left out, for people."""
        named = {f"intent {token}": why for token, why in self.intents.items()}
        named |= {f"profile {key}": why for key, why in self.profiles.items()}
        return (*by_user(self.jobs, view), *(f"{name}: {why}" for name, why in named.items()))


def by_user(faulty: Mapping[int, str], view: View) -> tuple[str, ...]:
    """Return a line for each user with faulty jobs, however many there are.

    Args:
        faulty: What is wrong with jobs, by job id.
        view: The queue.
    """
    found: dict[str, list[int]] = {}
    for job_id in faulty:
        known = view.jobs.get(job_id)  # of those left out only Muri's own jobs stay in the queue
        found.setdefault("others" if known is None else known.user, []).append(job_id)
    lines = []
    for user, (job_id, *more) in found.items():
        rest = f" (one of {len(more) + 1} faulty jobs of {user})" if more else ""
        lines.append(f"job {job_id}: {faulty[job_id]}{rest}")
    return tuple(lines)


def decide_without_culprits(cycle: CycleInput, decide: Callable[[CycleInput], _Answer]) -> tuple[_Answer, Quarantine]:
    """Make a decision; where it raises, make it without those who are at fault.

    Args:
        cycle: What to decide on.
        decide: Makes the decision and changes nothing.

    Returns:
        The decision, and who was left out.

    Raises:
        Exception: It raises without any job, intent and profile, too.
    """
    blamed: dict[_Subject, str] = {}
    for _ in range(_MOST_SEARCHES):
        tried = _without(cycle, blamed)
        try:
            return decide(tried), _quarantine(blamed)
        except Exception as error:
            culprit = _find_culprit(tried, decide)
            if culprit is None:
                raise
            log.exception("deciding failed because of %s; it is left out", _shown(culprit))
            blamed |= _with_its_user(culprit, f"Muri failed on it: {type(error).__name__}: {error}", cycle, blamed)
    return decide(_without(cycle, blamed)), _quarantine(blamed)


def _find_culprit(cycle: CycleInput, decide: Callable[[CycleInput], object]) -> _Subject | None:
    """Return the first subject with which deciding on all before it, and on it, raises; None when none is at fault."""
    subjects = _subjects(cycle)

    def raises(count: int) -> bool:
        try:
            decide(_without(cycle, subjects[count:]))
        except Exception:
            return True
        return False

    if raises(0):
        return None
    works, fails = 0, len(subjects)
    while fails - works > 1:
        middle = (works + fails) // 2
        works, fails = (works, middle) if raises(middle) else (middle, fails)
    return subjects[fails - 1] if subjects else None


def _subjects(cycle: CycleInput) -> Sequence[_Subject]:
    jobs = cycle.view.jobs
    intents = [intent.token for intent in cycle.intents]
    return [*jobs, *intents, *cycle.knowledge.profiles]


def _with_its_user(
    culprit: _Subject, why: str, cycle: CycleInput, blamed: Mapping[_Subject, str]
) -> dict[_Subject, str]:
    """The culprit, or all jobs of its user when these keep failing: nobody's jobs use up a cycle."""
    if not isinstance(culprit, int):
        return {culprit: why}
    jobs = cycle.view.jobs
    faults = Counter(jobs[job_id].uid for job_id in (*blamed, culprit) if isinstance(job_id, int))
    uid = jobs[culprit].uid
    if faults[uid] < _FAULTS_OF_A_USER:
        return {culprit: why}
    rest = f"Muri failed on {faults[uid]} jobs of its user; the others are left out, too"
    others = [job.job_id for job in jobs.values() if job.uid == uid and job.role is not Role.OTHER]
    found: dict[_Subject, str] = {job_id: rest for job_id in others if job_id not in blamed}
    return found | {culprit: why}


def _without(cycle: CycleInput, subjects: Sequence[_Subject] | Mapping[_Subject, str]) -> CycleInput:
    if not subjects:
        return cycle
    out = frozenset(subjects)
    view, known = cycle.view, cycle.knowledge
    jobs = {
        job_id: unread(job) if job_id in out else job
        for job_id, job in view.jobs.items()
        if job_id not in out or job.role is not Role.OTHER
    }
    records = tuple(job for job in view.snapshot.jobs if job.job_id in jobs)
    profiles = {key: profile for key, profile in known.profiles.items() if key not in out}
    return replace(
        cycle,
        view=View(replace(view.snapshot, jobs=records), jobs),
        knowledge=replace(known, profiles=profiles),
        intents=tuple(intent for intent in cycle.intents if intent.token not in out),
    )


def _shown(subject: _Subject) -> str:
    return f"job {subject}" if isinstance(subject, int) else f"the intent or profile {subject}"


def _quarantine(blamed: Mapping[_Subject, str]) -> Quarantine:
    return Quarantine(
        {each: why for each, why in blamed.items() if isinstance(each, int)},
        {each: why for each, why in blamed.items() if isinstance(each, str)},
        {each: why for each, why in blamed.items() if isinstance(each, ProfileKey)},
    )
