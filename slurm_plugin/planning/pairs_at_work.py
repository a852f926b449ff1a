"""How two members that share GPUs slow each other down, learnt while they train. Pure.

Each cycle is a round: the iteration time that the pilot job last reported against the one alone, of each member's
profile. Pairs of plain processes are always learnt. Turns show the waits for them instead, so these pairs are kept
apart, and learnt only for policies that plan on pairs (SJF-BSBF).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Final, NamedTuple

from muri.profiler.dryrun.steadiness import certainty
from muri.profiler.errors import InterferenceError
from muri.profiler.interference.ratios import LEARNT, MEASURED, Interference, Side, ordered
from muri.profiler.records import ProfileKey, StageProfile
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.planning.model_traits import batch_model
from muri.slurm_plugin.planning.running import as_submitted
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.comment_reports import MemberReport, member_report
from muri.slurm_plugin.records.roles import ManagedJob, RunningGroup
from muri.utc import text_of

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
    alone_s = [_alone_s(job, profile, cycle) for job, profile in zip(group.members, profiles, strict=True)]
    if not all(alone_s):
        return None
    turns = reports[0].discipline != "plain"
    return _Round((profiles[0], profiles[1]), (alone_s[0], alone_s[1]), (reports[0], reports[1]), turns)


def _alone_s(job: ManagedJob, profile: StageProfile, cycle: CycleInput) -> float:
    """Seconds of a member's iteration alone, in as many steps as it computes its batches in; 0 where nobody knows."""
    steps = 1 if job.membership is None else job.membership.accumulate_steps
    if steps == 1:
        return profile.iteration_s
    model = batch_model(profile.key, cycle.knowledge.profiles, cycle.knowledge.traits.fits, steps)
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
