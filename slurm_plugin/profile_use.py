"""Reads and writes the profile store for the controller.

A damaged store must not stop the controller: it is set aside, which an error in the log says, and never emptied. Any
other read error is logged, and the cycle plans without those figures.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, Protocol, TypeVar

from muri.clock import moment, text_of
from muri.errors import MuriError
from muri.policies.types import Policy
from muri.profiler.drift import Drift, DriftRule, find_drift, is_due, measured_by_jobs
from muri.profiler.dryrun.steadiness import certainty
from muri.profiler.errors import CorruptStoreError, InterferenceError
from muri.profiler.estimates import estimates_of, unknown_models
from muri.profiler.interference import (
    FITS,
    LEARNED,
    MEASURED,
    Interference,
    LinearFit,
    Side,
    by_pair,
    every_pair,
    ordered,
)
from muri.profiler.interference import put as put_pair
from muri.profiler.records import GPU_COUNT, GPU_MEM_GIB, STAGES, Document, ProfileKey, StageProfile
from muri.profiler.sensitivity import SENSITIVITIES, SensitivityProfile
from muri.profiler.slowdown import SLOWDOWNS, SlowdownFit
from muri.profiler.store import (
    ACCUMULATES,
    DRIFT,
    Author,
    Observation,
    ProfileStore,
    StaleMark,
)
from muri.profiler.store_file import set_aside
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.cycle_input import ATTEMPTS, CycleInput, Knowledge
from muri.slurm_plugin.planning.gathered import Gathered, doubt
from muri.slurm_plugin.planning.model_traits import UNUSABLE, KnownTraits, batch_model
from muri.slurm_plugin.planning.slurm_requests import as_submitted
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.comment_reports import job_use, member_report
from muri.slurm_plugin.records.journal import PAIR, RETRY_AFTER_S, Journal
from muri.slurm_plugin.records.roles import ManagedJob, Role, RunningGroup, View, profile_key

log = logging.getLogger("muri.controller")

_Read = TypeVar("_Read")

_CLOCK: Final = "milliseconds"
"""Cycles may follow each other within a second."""


def observed(view: View) -> Iterator[tuple[ProfileKey, Observation]]:
    """Yield the stages that the members of running groups report.

    Without turns other members slow a stage itself down, not the wait for it: that does not contradict a profile.
    """
    at = text_of(view.snapshot.taken_s, _CLOCK)
    for group in (group for group in view.running_groups if group.mode == "interleave"):
        for job in group.members:
            report = member_report(group.pilot.reports.speeds, job.job_id)
            if report is None or report.discipline == "plain":
                continue
            if report.iterations and len(report.stage_s) == len(STAGES):
                key = profile_key(as_submitted(job, group.pilot), view.node_index)
                use = job_use(group.pilot.reports.speeds, job.job_id)
                held_gib = None if use is None or GPU_MEM_GIB.fault(use.gpu_mem_gib) else use.gpu_mem_gib
                yield key, Observation(at, job.job_id, report.iterations, report.stage_s, held_gib)


def watch(store: ProfileStore, view: View, config: Config) -> None:
    """Keep a cycle's observations, set or take back stale marks, and replace uncertain profiles of dry runs.

    Raises:
        StoreError: The store cannot be written.
    """
    if not config.tuning.drift_limit:
        return
    found = tuple(observed(view))
    rule = DriftRule(config.tuning.drift_limit, config.tuning.drift_after_s)
    for key, item in found:
        if is_due(store.observations(key), item.job_id, item.observed_at, rule):
            store.observe(key, item)
    marks = {mark.key: mark for mark in store.stale_marks()}
    for key in sorted({key for key, _ in found}):
        profile = next(filter(None, map(store.get, key.lookup_order)), None)
        if profile is not None and doubt(profile, config):
            measured = measured_by_jobs(profile, store.observations(key), rule)
            if measured is not None:
                log.info(
                    "profile of %s: the dry run was not sure; %d iterations of jobs count", key, measured.iterations
                )
                store.put(replace(measured, key=key))
            continue
        drift = None if profile is None or profile.is_estimate else find_drift(profile, store.observations(key), rule)
        if drift is not None:
            _judge(store, key, drift, marks.get(key), config, view.snapshot.taken_s)


def _judge(
    store: ProfileStore, key: ProfileKey, drift: Drift, mark: StaleMark | None, config: Config, now_s: float
) -> None:
    if mark is None and drift.drifted and _may_mark(store, key, config, now_s):
        log.warning("profile of %s is stale: %s; the next job of it is measured again", key, drift)
        store.mark_stale(key, str(drift), Author(DRIFT, text_of(now_s, _CLOCK), "stale"))
    elif mark is not None and mark.who == DRIFT and drift.right:
        log.info("profile of %s is right again: %s", key, drift)
        store.clear_stale(key, Author(DRIFT, text_of(now_s, _CLOCK), "clear"))


def _may_mark(store: ProfileStore, key: ProfileKey, config: Config, now_s: float) -> bool:
    """Whether the last mark is long ago, for a measurement that did not help is not repeated at once."""
    ours = (entry for entry in store.audit() if entry.key == key and entry.who == DRIFT and entry.action == "stale")
    times = [at.timestamp() for entry in ours if (at := moment(entry.at)) is not None]
    return not times or now_s - max(times) >= config.tuning.drift_again_s


def learn_pairs(store: ProfileStore, journal: Journal, cycle: Gathered, policy: Policy) -> None:
    """Keep how the members of running pairs slow each other down, unless a surer measurement is stored.

    Policies that give out GPUs one by one plan on pairs that take turns, too.

    Raises:
        StoreError: The store cannot be written.
    """
    traits = cycle.knowledge.traits
    plain, in_turns = by_pair(traits.pairs), by_pair(traits.pairs_in_turns)
    for course in pairs_at_work(cycle, journal.facts(PAIR), packs=policy.supports_packing):
        journal.set_fact(PAIR, str(course.pilot), course.fact)
        pair = learned(course, (in_turns if course.turns else plain).get(course.pair), cycle.now_s)
        if pair is not None:
            put_pair(store, pair)


def open_profiles(path: Path) -> ProfileStore:
    """Open the controller's store; one that is damaged is set aside and an empty one opened.

    Raises:
        StoreError: It cannot be used for another reason, such as a newer format.
    """
    try:
        store = ProfileStore(path)
        try:
            store.check()
        except BaseException:
            store.close()
            raise
    except CorruptStoreError as error:
        log_set_aside(error, set_aside(path, datetime.now(UTC)))
        store = ProfileStore(path)
        store.is_replacement = True
    return store


def log_set_aside(error: CorruptStoreError, place: Path) -> None:
    """Log that a damaged store was set aside, and how to save its data."""
    log.error(
        "the profile store %s is damaged (%s): it was set aside as %s and an empty one begun, so models are "
        "measured again, and jobs start from the next cycle on. To save what is left of it: sqlite3 %s .recover",
        error.path, error.detail, place, place,
    )  # fmt: skip


def read_traits(store: ProfileStore) -> KnownTraits:
    """Read the stored traits of models; an error is logged, and the cycle plans without them.

    Raises:
        CorruptStoreError: The store is damaged, which the caller handles.
    """
    try:
        pairs = every_pair(store)
        curves = _read_each(store, SENSITIVITIES, SensitivityProfile.from_document).values()
        return KnownTraits(
            {curve.name: curve for curve in curves if curve.cpu.points},
            _read_each(store, FITS, lambda document: LinearFit.from_dict(document.body)),
            tuple(pair for pair in pairs if not pair.turns),
            # Profile keys, as text, of the scripts whose batches can be split.
            frozenset(document.name for document in store.documents(ACCUMULATES)),
            tuple(pair for pair in pairs if pair.turns),
            # Horus's f as fitted here, by type of GPU.
            _read_each(store, SLOWDOWNS, lambda document: SlowdownFit.from_dict(document.body).curve),
        )
    except CorruptStoreError:
        raise
    except MuriError as error:
        log.warning("this cycle plans without the stored traits of models: %s", error)
        return KnownTraits()


def _read_each(store: ProfileStore, kind: str, read: Callable[[Document], _Read]) -> dict[str, _Read]:
    """Read all documents of a kind, by name; one that cannot be understood is left out."""
    values: dict[str, _Read] = {}
    for document in store.documents(kind):
        try:
            values[document.name] = read(document)
        except UNUSABLE as error:
            log.warning("%s %s is not used: %s", kind, document.name, error)
    return values


class ProfileSink(Protocol):
    """The part of the profile store that takes measurements."""

    def put(self, profile: StageProfile) -> object:
        """Store one profile."""
        ...

    def put_document(self, kind: str, document: Document) -> None:
        """Store a document."""
        ...

    def remove_document(self, kind: str, name: str) -> bool:
        """Forget one."""
        ...


def note_accumulates(store: ProfileSink, profile: StageProfile, *, accumulates: bool) -> None:
    """Store whether a model's script declared in its dry run that its batches can be split."""
    if accumulates:
        store.put_document(ACCUMULATES, Document(str(profile.key), profile.measured_at, {}))
    else:
        store.remove_document(ACCUMULATES, str(profile.key))


def without_doubtful(cycle: CycleInput, store: ProfileStore) -> CycleInput:
    """Leave out uncertain profiles, so that their models plan like models that were never measured.

    A model is measured again, `ATTEMPTS` times in all; then its jobs run alone, as after failed dry runs,
    until `RETRY_AFTER_S` has gone by. A model at work in a group keeps its profile, on which the group was
    planned, until its jobs' own reports replace it (`watch`).

    Raises:
        StoreError: The store cannot be read.
    """
    known, config = cycle.knowledge, cycle.config
    if not any(doubt(profile, config) for profile in known.profiles.values()):
        return cycle
    at_work = {
        cycle.key_of(as_submitted(job, group.pilot)) for group in cycle.view.running_groups for job in group.members
    }
    dropped: set[ProfileKey] = set()
    failures = dict(known.failures)
    for key in set(_keys(cycle)) - at_work:
        profiles = {like: known.profiles[like] for like in key.lookup_order if like in known.profiles}
        doubted = {like for like, profile in profiles.items() if doubt(profile, config)}
        if not doubted:
            continue
        dropped |= doubted
        tried = [past for past in store.history(key) if doubt(past, config) and _is_recent(past, cycle.now_s)]
        if len(tried) >= ATTEMPTS:
            failures[str(key)] = (len(tried), doubt(tried[0], config))
    if not dropped:
        return cycle
    kept = {key: profile for key, profile in known.profiles.items() if key not in dropped}
    return replace(cycle, knowledge=replace(known, profiles=kept, failures=failures))


def _is_recent(profile: StageProfile, now_s: float) -> bool:
    at = moment(profile.measured_at)
    return at is not None and now_s - at.timestamp() < RETRY_AFTER_S


def with_estimates(cycle: CycleInput, store: ProfileStore) -> CycleInput:
    """Add estimates of the queue's models that have no profile.

    They count as stale: they serve planning at once, and the model is measured when there is room for a dry run, or
    while its jobs train. A model that could not be measured gets none, and its jobs run alone. Where jobs are measured
    in place, each other model has an estimate at least; else jobs without one wait for their dry runs. So a failure
    here does not fail the cycle.

    Raises:
        CorruptStoreError: The store is damaged; the cycle sets it aside.
    """
    known, config = cycle.knowledge, cycle.config
    missing = {key for key in _keys(cycle) if known.profile_of(key) is None and not known.failed(key)}
    estimates = _estimates(store, missing) if missing else {}
    if config.profiling.in_place:
        estimates = _unknown(missing, known, config) | estimates
    known = replace(known, profiles={**known.profiles, **estimates}, stale=known.stale | estimates.keys())
    return replace(cycle, knowledge=known)


def _estimates(store: ProfileStore, missing: Collection[ProfileKey]) -> dict[ProfileKey, StageProfile]:
    try:
        return estimates_of(store, sorted(missing))
    except CorruptStoreError:
        raise
    except MuriError as error:
        log.warning("this cycle plans without estimates: %s", error)
    except Exception:  # prediction libraries may raise anything; an estimate must not cost the cycle
        log.exception("this cycle plans without estimates")
    return {}


def _unknown(missing: Collection[ProfileKey], knowledge: Knowledge, config: Config) -> dict[ProfileKey, StageProfile]:
    """Return stand-ins for the profiles of models about which nothing is known.

    They may need all of a GPU's memory: where the site says how much there is, they run alone until they are measured.
    """
    known, mem_gib = knowledge.profiles.values(), config.gpu_mem_gib
    # Only its user and its number of GPUs tell one such model from another.
    alike = {(key.user, key.gpu_count): key for key in missing}
    found = unknown_models(known, alike.values())
    means = ((key, found[alike[key.user, key.gpu_count]]) for key in missing)
    return {key: replace(mean, key=key, gpu_mem_gib=mem_gib.get(key.gpu_type, 0)) for key, mean in means}


def _keys(cycle: CycleInput) -> Iterator[ProfileKey]:
    """Yield the profile keys of the jobs that wait, and of those that run in groups or alone."""
    for job in (
        *cycle.view.having(Role.CANDIDATE),
        *cycle.view.having(Role.RELEASED),
        *(as_submitted(member, group.pilot) for group in cycle.view.running_groups for member in group.members),
    ):
        # A requeued member has no GPUs, nor has a pilot whose user took them from its request; and a user may ask for
        # billions: no profile is of so many.
        if not GPU_COUNT.fault(job.gpu_count):
            yield cycle.key_of(job)


LEAST_ROUNDS: Final = 3

MOST_ROUNDS: Final = 20

LEAST_ITERATIONS: Final = 20
"""A member that has done fewer may still warm up."""

_TURNS: Final = "turns"


@dataclass(frozen=True, slots=True)
class PairCourse:
    """The observations of two members so far."""

    pilot: int  # Their pilot job
    jobs: tuple[int, int]
    seen: tuple[int, int]  # Iterations that each had done at the last round
    ratios: tuple[tuple[float, float], ...]  # Iteration time of each over that alone, in the newest rounds
    profiles: tuple[StageProfile, StageProfile]
    turns: bool  # Whether they take turns

    @property
    def fact(self) -> list[Any]:
        """Its form in the journal."""
        return [self.jobs, self.seen, self.ratios, *([_TURNS] if self.turns else [])]

    @property
    def pair(self) -> tuple[ProfileKey, ProfileKey]:
        """The profile keys of both, the lesser first."""
        return ordered(self.profiles[0].key, self.profiles[1].key)


def pairs_at_work(cycle: Gathered, facts: Mapping[str, Any], *, packs: bool) -> Iterator[PairCourse]:
    """Yield the pairs with news in this cycle.

    Args:
        cycle: The running groups, and their models' profiles.
        facts: Observations of earlier cycles, by pilot job.
        packs: Whether the policy plans on pairs that take turns.
    """
    for group in cycle.view.running_groups:
        now = _round(group, cycle)
        if now is None or (now.turns and not packs):
            continue
        earlier = _read(facts.get(str(now.pilot)), now.jobs, turns=now.turns)
        if earlier is None:
            yield now
        elif all(count > before for count, before in zip(now.seen, earlier[0], strict=True)):
            yield replace(now, ratios=(*earlier[1], *now.ratios)[-MOST_ROUNDS:])
        # Else nothing was reported since, or a script has started anew.


def learned(course: PairCourse, stored: Interference | None, now_s: float) -> Interference | None:
    """Return the interference of a pair that a course adds to; None where the stored one (alike in turns) stays.

    The newest `MOST_ROUNDS` rounds count, of all jobs of the pair: older ones fade as pairs go on running.
    """
    if len(course.ratios) < LEAST_ROUNDS:
        return None
    keys = course.profiles[0].key, course.profiles[1].key
    earlier = () if stored is None else stored.seen_from(keys[0]).samples
    fresh = course.ratios if not earlier or len(course.ratios) == LEAST_ROUNDS else course.ratios[-1:]
    samples = (*earlier, *fresh)[-MOST_ROUNDS:]
    try:
        a, b = (
            _side(profile, [ratios[index] for ratios in samples], course.seen[index])
            for index, profile in enumerate(course.profiles)
        )
    except InterferenceError:
        return None
    pair = Interference(a, b, len(samples), 0.0, text_of(now_s), LEARNED, course.turns, samples)
    surer = stored is not None and stored.source == MEASURED and stored.confidence > pair.confidence
    return None if surer else pair


def _round(group: RunningGroup, cycle: Gathered) -> PairCourse | None:
    """Return what two members report now; None where it does not show how two models slow each other down."""
    if len(group.members) != 2 or any(job.state is not JobState.RUNNING for job in group.members):
        return None
    every = [member_report(group.pilot.reports.speeds, job.job_id) for job in group.members]
    reports = [report for report in every if report is not None and report.discipline]
    known = [cycle.known[job.job_id].profile for job in group.members]
    profiles = [profile for profile in known if profile is not None and not profile.is_estimate]
    if len(profiles) != 2 or sum((report.iterations or 0) >= LEAST_ITERATIONS for report in reports) != 2:
        return None
    alone_s = [_alone_s(job, profile, cycle.knowledge) for job, profile in zip(group.members, profiles, strict=True)]
    if not all(alone_s):
        return None
    a, b = reports
    return PairCourse(
        group.pilot.job_id,
        (group.members[0].job_id, group.members[1].job_id),
        (a.iterations or 0, b.iterations or 0),
        ((a.iteration_s / alone_s[0], b.iteration_s / alone_s[1]),),
        (profiles[0], profiles[1]),
        turns=a.discipline != "plain",
    )


def _alone_s(job: ManagedJob, profile: StageProfile, knowledge: Knowledge) -> float:
    """Seconds of a member's iteration alone, in as many steps as it computes its batches in; 0 if unknown."""
    steps = 1 if job.membership is None else job.membership.accumulate_steps
    if steps == 1:
        return profile.iteration_s
    model = batch_model(profile.key, knowledge.profiles, knowledge.traits.fits, steps)
    return 0.0 if model is None else profile.iteration_s / model.speed(steps)


def _read(
    fact: Any, jobs: tuple[int, int], *, turns: bool
) -> tuple[tuple[int, int], tuple[tuple[float, float], ...]] | None:
    """Return earlier cycles' counts and ratios of the same two jobs; None for other jobs or a damaged fact."""
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
