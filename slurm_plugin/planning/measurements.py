"""What running members tell of their models: profiles to be stored, and how pairs slow each other down. Pure.

A user may write anything into his jobs' comments: figures are checked as a dry run's are, and serve his own jobs alone.
Only a member's own run is believed, and only times within it.

Of pairs each cycle is a round: the iteration time that the pilot job last reported against the one alone, of each
member's profile. Pairs of plain processes are always learned. Turns show the waits for them instead, so these pairs are
kept apart, and learned only for policies that plan on pairs (SJF-BSBF).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Final, NamedTuple

from muri.profiler.dryrun.steadiness import certainty
from muri.profiler.errors import InterferenceError
from muri.profiler.interference.ratios import LEARNT, MEASURED, Interference, Side, ordered
from muri.profiler.records import IN_PLACE, ProfileError, ProfileKey, StageProfile
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import KeepProfile, NotMeasured
from muri.slurm_plugin.planning.cycle_input import CycleInput, Knowledge
from muri.slurm_plugin.planning.model_traits import batch_model
from muri.slurm_plugin.planning.running import as_submitted
from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.comment_reports import MemberReport, member_report, profile_in, python_in
from muri.slurm_plugin.records.roles import ManagedJob, RunningGroup
from muri.utc import moment, text_of

_CLOCKS_DIFFER_S: Final = 60.0
"""By so much at most does a node's clock, which members' reports name, differ from slurmctld's."""

_SURE: Final = 0.95
"""With this confidence a measurement ends as sure; figures told earlier have less, and surer ones replace them."""

_UNTRUE: Final = (ProfileError, KeyError, TypeError, ValueError, OverflowError)


class _Report(NamedTuple):
    """What the comment of a member that has run says of its model."""

    job: ManagedJob
    measured: Mapping[str, Any]
    key: ProfileKey


def ran_s(job: Job, now_s: float) -> float:
    """Return the seconds of a job's last run, 0 when it has not started."""
    return max(0.0, (job.end_s or now_s) - job.start_s) if job.start_s else 0.0


def doubt(profile: StageProfile, config: Config) -> str:
    """Why a profile is not known well enough to plan with, "" when it is.

    Only measurements of a few iterations are doubted: who imports or corrects figures vouches for them.
    """
    sure, least = profile.detail.confidence, config.tuning.least_confidence
    if profile.source not in {"dry-run", IN_PLACE} or sure is None or sure >= least:
        return ""
    return f"it was {sure:.0%} sure of its means, less than {least:.0%}"


def measured_in_place(cycle: CycleInput) -> Iterator[KeepProfile | NotMeasured]:
    """Return what members told that is new: at most one profile for each key, the newest."""
    kept: dict[ProfileKey, KeepProfile] = {}
    for report in _reports(cycle):
        found = None
        with suppress(*_UNTRUE):
            found = _told(report, cycle.knowledge, cycle.config, cycle.now_s)
        if isinstance(found, KeepProfile):
            known = kept.get(found.profile.key)
            if known is None or _is_before(known.profile.measured_at, found.profile.measured_at):
                kept[found.profile.key] = found
        elif found is not None:
            yield found
    yield from kept.values()


def untrue_reports(cycle: CycleInput) -> dict[int, str]:
    """Return why what jobs say of their models cannot be true, by job id."""
    found = {}
    for report in _reports(cycle):
        try:
            _told(report, cycle.knowledge, cycle.config, cycle.now_s)
        except _UNTRUE as error:
            found[report.job.job_id] = f"its figures of its model cannot be true: {error}"
    return found


def _reports(cycle: CycleInput) -> Iterator[_Report]:
    """What members say of their models; none where nothing tells any more how many GPUs one had asked for."""
    if not cycle.config.profiling.in_place:
        return
    for job in cycle.view.jobs.values():
        measured, membership = job.reports.measured, job.membership
        pilot = None if measured is None or membership is None else cycle.view.jobs.get(membership.pilot)
        if measured is not None and pilot is not None and ran_s(job, cycle.now_s):
            yield _Report(job, measured, cycle.key_of(as_submitted(job, pilot)))


def _told(report: _Report, knowledge: Knowledge, config: Config, now_s: float) -> KeepProfile | NotMeasured | None:
    """What a report says of a model; None where it is of no use: it is known, or of an earlier run.

    Raises:
        ProfileError, KeyError, TypeError, ValueError, OverflowError: It cannot be true.
    """
    job, measured, key = report
    at_s = float(measured["at"])
    if at_s > now_s + _CLOCKS_DIFFER_S:
        raise ValueError("it names a time to come")
    if not job.start_s - _CLOCKS_DIFFER_S <= at_s <= now_s:
        return None
    if "error" in measured:
        return _failure(key, str(measured["error"]), at_s, knowledge)
    profile = profile_in(measured, key, text_of(at_s), ran_s(job, now_s), IN_PLACE)
    if not _is_wanted(profile, knowledge, config):
        return None
    environment = "" if job.facts is None else job.facts.environment
    return KeepProfile("", profile, bool(measured.get("accumulates")), python_in(measured), environment)


def _failure(key: ProfileKey, why: str, at_s: float, knowledge: Knowledge) -> NotMeasured | None:
    """A run that told too little, if it is not counted yet; a model that is known needs no more runs."""
    known, counted_s = knowledge.profile_of(key), knowledge.failed_s.get(str(key), 0.0)
    if (known is not None and not known.is_estimate) or not counted_s < at_s:
        return None
    return NotMeasured(str(key), why, at_s)


def _is_wanted(profile: StageProfile, knowledge: Knowledge, config: Config) -> bool:
    """Whether a measurement takes the place of what is known."""
    known = knowledge.profile_of(profile.key)
    if known is None or known.is_estimate:
        return True
    if _is_before(profile.measured_at, known.measured_at):
        return False
    if doubt(known, config):
        return not doubt(profile, config)
    if _is_surer(profile, known):
        return True
    stale = knowledge.is_stale(profile.key)
    return stale and _is_before(knowledge.stale_since(profile.key), profile.measured_at)


def _is_surer(profile: StageProfile, known: StageProfile) -> bool:
    """Whether a measurement is surer than one that was told before it was sure."""
    before, now = known.detail.confidence, profile.detail.confidence
    return known.source == IN_PLACE and before is not None and now is not None and before < min(now, _SURE)


def _is_before(one: str, other: str) -> bool:
    """Whether a time is earlier than another; one that cannot be read is."""
    earlier, later = moment(one), moment(other)
    return earlier is None or (later is not None and earlier < later)


LEAST_ROUNDS: Final = 3
MOST_ROUNDS: Final = 20
LEAST_ITERATIONS: Final = 20
"""A member that has done fewer may still warm up."""

_TURNS: Final = "turns"


@dataclass(frozen=True, slots=True)
class PairCourse:
    """What was seen of two members so far.

    Attributes:
        pilot: Their pilot job.
        jobs: Both, by id.
        seen: Iterations that each had done at the last round.
        ratios: How many times as long as alone the iterations of each took, by round; the newest rounds.
        profiles: Of both.
        turns: Whether they take turns.
    """

    pilot: int
    jobs: tuple[int, int]
    seen: tuple[int, int]
    ratios: tuple[tuple[float, float], ...]
    profiles: tuple[StageProfile, StageProfile]
    turns: bool

    @property
    def fact(self) -> list[Any]:
        """As the journal keeps it."""
        return [self.jobs, self.seen, self.ratios, *([_TURNS] if self.turns else [])]

    @property
    def pair(self) -> tuple[ProfileKey, ProfileKey]:
        """What both are profiled under, the lesser first."""
        return ordered(self.profiles[0].key, self.profiles[1].key)


class _Round(NamedTuple):
    """What one cycle shows of two members: profiles, seconds of an iteration alone, and what was reported."""

    profiles: tuple[StageProfile, StageProfile]
    alone_s: tuple[float, float]
    told: tuple[MemberReport, MemberReport]
    turns: bool


def pairs_at_work(cycle: CycleInput, facts: Mapping[str, Any], *, packs: bool) -> Iterator[PairCourse]:
    """Return the pairs of which this cycle tells something new.

    Args:
        cycle: What runs, and what is known of it.
        facts: What earlier cycles have seen, by pilot job.
        packs: Whether the policy plans on pairs that take turns.
    """
    for group in cycle.view.running_groups:
        found = _round(group, cycle)
        if found is None or (found.turns and not packs):
            continue
        jobs = group.members[0].job_id, group.members[1].job_id
        seen = found.told[0].iterations or 0, found.told[1].iterations or 0
        earlier = _read(facts.get(str(group.pilot.job_id)), jobs, turns=found.turns)
        if earlier is not None and any(now <= before for now, before in zip(seen, earlier[0], strict=True)):
            continue  # nothing was reported since, or a script has started anew
        ratio = found.told[0].iteration_s / found.alone_s[0], found.told[1].iteration_s / found.alone_s[1]
        ratios = (*(() if earlier is None else earlier[1]), ratio)[-MOST_ROUNDS:]
        yield PairCourse(group.pilot.job_id, jobs, seen, ratios, found.profiles, found.turns)


def learnt(course: PairCourse, stored: Interference | None, now_s: float) -> Interference | None:
    """Return what a course adds to what is known of its pair; None where that is nothing.

    The newest `MOST_ROUNDS` rounds count, of all jobs of the pair: what older ones showed fades as pairs go on running.

    Args:
        course: Two members.
        stored: What is known of their pair, in turns or without as they are.
        now_s: The current time, seconds since the epoch.
    """
    if len(course.ratios) < LEAST_ROUNDS:
        return None
    keys = course.profiles[0].key, course.profiles[1].key
    earlier = () if stored is None else stored.seen_from(keys[0]).samples
    fresh = course.ratios if not earlier or len(course.ratios) == LEAST_ROUNDS else course.ratios[-1:]
    samples = (*earlier, *fresh)[-MOST_ROUNDS:]
    try:
        a, b = (
            _side(profile, [each[index] for each in samples], course.seen[index])
            for index, profile in enumerate(course.profiles)
        )
    except InterferenceError:
        return None
    found = Interference(a, b, len(samples), 0.0, text_of(now_s), LEARNT, course.turns, samples)
    surer = stored is not None and stored.source == MEASURED and stored.confidence > found.confidence
    return None if surer else found


def _round(group: RunningGroup, cycle: CycleInput) -> _Round | None:
    """What both members' profiles and reports say; None where they do not say how two models get on."""
    if len(group.members) != 2 or any(job.state is not JobState.RUNNING for job in group.members):
        return None
    told = [member_report(group.pilot.reports.speeds, job.job_id) for job in group.members]
    known = [cycle.knowledge.profile_of(cycle.key_of(as_submitted(job, group.pilot))) for job in group.members]
    reports = [each for each in told if each is not None and each.discipline and each.iterations]
    profiles = [each for each in known if each is not None and not each.is_estimate]
    if len(reports) != 2 or len(profiles) != 2 or any((each.iterations or 0) < LEAST_ITERATIONS for each in reports):
        return None
    alone_s = [_alone_s(job, profile, cycle.knowledge) for job, profile in zip(group.members, profiles, strict=True)]
    if not all(alone_s):
        return None
    turns = reports[0].discipline != "plain"
    return _Round((profiles[0], profiles[1]), (alone_s[0], alone_s[1]), (reports[0], reports[1]), turns)


def _alone_s(job: ManagedJob, profile: StageProfile, knowledge: Knowledge) -> float:
    """Seconds of a member's iteration alone, in as many steps as it computes its batches in; 0 where nobody knows."""
    steps = 1 if job.membership is None else job.membership.accumulate_steps
    if steps == 1:
        return profile.iteration_s
    model = batch_model(profile.key, knowledge.profiles, knowledge.traits.fits, steps)
    return 0.0 if model is None else profile.iteration_s / model.speed(steps)


def _read(
    fact: Any, jobs: tuple[int, int], *, turns: bool
) -> tuple[tuple[int, int], tuple[tuple[float, float], ...]] | None:
    """What earlier cycles have seen of the same two jobs; None where they saw others, or the fact is damaged."""
    try:
        members, (first, second), ratios, *rest = fact
        if tuple(members) != jobs or bool(rest) != turns:
            return None
        return (int(first), int(second)), tuple((float(a), float(b)) for a, b in ratios)
    except (TypeError, ValueError):
        return None


def _side(profile: StageProfile, ratios: Sequence[float], iterations: int) -> Side:
    sure = certainty(ratios)
    ratio, shared_s = max(1.0, median(ratios)), fmean(ratios) * profile.iteration_s
    return Side(profile.key, profile.iteration_s, shared_s, ratio, sure.half_width, sure.probability, iterations)
