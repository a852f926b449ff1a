"""How two members that share without turns slow each other down, learnt while they train. Pure.

Interference ratios are of jobs side by side as plain processes; turns would show the waits for them instead. Each cycle
is a round: the iteration time that the pilot job last reported against the one alone, of each member's profile.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Final

from muri.profiler.dryrun.steadiness import certainty
from muri.profiler.errors import InterferenceError
from muri.profiler.interference.ratios import Interference, Side
from muri.profiler.records import StageProfile
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.planning.running import as_submitted
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.comment_reports import MemberReport, member_report
from muri.slurm_plugin.records.roles import RunningGroup
from muri.utc import text_of

LEAST_ROUNDS: Final = 3
MOST_ROUNDS: Final = 20
LEAST_ITERATIONS: Final = 20
"""A member that has done fewer may still warm up."""


@dataclass(frozen=True, slots=True)
class PairCourse:
    """What was seen of two members so far.

    Attributes:
        pilot: Their pilot job.
        jobs: Both, by id.
        seen: Iterations that each had done at the last round.
        ratios: How many times as long as alone the iterations of each took, by round; the newest rounds.
        interference: What follows; None while the rounds are too few.
    """

    pilot: int
    jobs: tuple[int, int]
    seen: tuple[int, int]
    ratios: tuple[tuple[float, float], ...]
    interference: Interference | None = None

    @property
    def fact(self) -> list[Any]:
        """As the journal keeps it."""
        return [self.jobs, self.seen, self.ratios]


def pairs_at_work(cycle: CycleInput, facts: Mapping[str, Any]) -> Iterator[PairCourse]:
    """Return the pairs of which this cycle tells something new.

    Args:
        cycle: What runs, and what is known of it.
        facts: What earlier cycles have seen, by pilot job.
    """
    for group in cycle.view.running_groups:
        found = _round(group, cycle)
        if found is None:
            continue
        sides, told = found
        jobs = group.members[0].job_id, group.members[1].job_id
        seen = told[0].iterations or 0, told[1].iterations or 0
        earlier = _read(facts.get(str(group.pilot.job_id)), jobs)
        if earlier is not None and any(now <= before for now, before in zip(seen, earlier[0], strict=True)):
            continue  # nothing was reported since, or a script has started anew
        ratio = told[0].iteration_s / sides[0].iteration_s, told[1].iteration_s / sides[1].iteration_s
        ratios = (*(() if earlier is None else earlier[1]), ratio)[-MOST_ROUNDS:]
        yield PairCourse(group.pilot.job_id, jobs, seen, ratios, _interference(sides, ratios, seen, cycle.now_s))


def _round(
    group: RunningGroup, cycle: CycleInput
) -> tuple[tuple[StageProfile, StageProfile], tuple[MemberReport, MemberReport]] | None:
    """Both members' profiles and reports; None where they do not say how two models get on."""
    if len(group.members) != 2 or any(job.state is not JobState.RUNNING for job in group.members):
        return None
    told = [member_report(group.pilot.reports.speeds, job.job_id) for job in group.members]
    known = [cycle.knowledge.profile_of(cycle.key_of(as_submitted(job, group.pilot))) for job in group.members]
    reports = [each for each in told if each is not None and each.discipline == "plain" and each.iterations]
    profiles = [each for each in known if each is not None and not each.is_estimate]
    if len(reports) != 2 or len(profiles) != 2 or any((each.iterations or 0) < LEAST_ITERATIONS for each in reports):
        return None
    return (profiles[0], profiles[1]), (reports[0], reports[1])


def _read(fact: Any, jobs: tuple[int, int]) -> tuple[tuple[int, int], tuple[tuple[float, float], ...]] | None:
    """What earlier cycles have seen of the same two jobs; None where they saw others, or the fact is damaged."""
    try:
        members, (first, second), ratios = fact
        if tuple(members) != jobs:
            return None
        return (int(first), int(second)), tuple((float(a), float(b)) for a, b in ratios)
    except (TypeError, ValueError):
        return None


def _interference(
    profiles: tuple[StageProfile, StageProfile],
    ratios: Sequence[tuple[float, float]],
    seen: tuple[int, int],
    now_s: float,
) -> Interference | None:
    if len(ratios) < LEAST_ROUNDS:
        return None
    try:
        a, b = (_side(profile, [each[index] for each in ratios], seen[index]) for index, profile in enumerate(profiles))
    except InterferenceError:
        return None
    return Interference(a, b, len(ratios), 0.0, text_of(now_s))


def _side(profile: StageProfile, ratios: Sequence[float], iterations: int) -> Side:
    sure = certainty(ratios)
    ratio, shared_s = max(1.0, median(ratios)), fmean(ratios) * profile.iteration_s
    return Side(profile.key, profile.iteration_s, shared_s, ratio, sure.half_width, sure.probability, iterations)
