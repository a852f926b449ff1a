"""Models beyond their stage profiles: stored figures, converted to the traits that policies plan with. Pure.

CPU and memory sensitivities, how times and memory follow the batch size, and how pairs slow each other down.
A dry run may also measure how the throughput follows the CPUs, as in Synergy (Mohan et al., OSDI 2022, section 3.1): a
job is profiled on arrival, by bisection over its CPUs.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, product
from typing import Any, Final

from muri.clock import MIB, MIB_PER_GIB
from muri.errors import MuriError
from muri.policies.traits import (
    BatchModel,
    Demand,
    InterferenceTable,
    PairSpeed,
    Sensitivity,
    TraitError,
    derived_sensitivity,
)
from muri.policies.types import PlanRequest, Policy
from muri.profiler.dryrun.messages import READS
from muri.profiler.errors import FitError, SensitivityError
from muri.profiler.interference import (
    Interference,
    LinearFit,
    Pairs,
    Point,
    by_pair,
    computation_name,
    estimated_ratio,
    find,
    fit_computation,
    fit_line,
    overlap_exponent,
)
from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.sensitivity import (
    DOUBT,
    RUN_SPREAD,
    Dataset,
    SensitivityProfile,
    cache_sizes,
    measured_overlap,
    saturating_cache_gib,
    throughput,
)
from muri.profiler.slowdown import Parabola
from muri.slurm_plugin.records.cluster import Job, NodeIndex
from muri.slurm_plugin.records.comment_reports import SWEEP, sweep_in

log = logging.getLogger("muri.controller")

_SAME = DOUBT * RUN_SPREAD

UNUSABLE: Final = (MuriError, ArithmeticError, LookupError, TypeError, ValueError)
"""What reading a stored document raises when its figures have the wrong type or cannot be true."""

_Speeds = Mapping[tuple[ProfileKey, ProfileKey], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class KnownTraits:
    """Stored figures of models, read once in a cycle."""

    # As `muri profile run --sweep` stores them, by name: the model's, or a profile key's text
    sensitivities: Mapping[str, SensitivityProfile] = field(default_factory=dict)
    fits: Mapping[str, LinearFit] = field(default_factory=dict)  # Iteration times over batch sizes, by name
    # Models that were measured side by side, or that shared GPUs as plain processes do
    pairs: tuple[Interference, ...] = ()
    # Profile keys, as text, of scripts that declared that their batches can be split
    accumulating: frozenset[str] = frozenset()
    pairs_in_turns: tuple[Interference, ...] = ()  # Models that shared GPUs by turns
    slowdowns: Mapping[str, Parabola] = field(default_factory=dict)  # Horus's f as fitted here, by type of GPU

    def is_measured(self, key: ProfileKey) -> bool:
        """Whether the model's sensitivity to CPUs was measured."""
        return self._sensitivity_of(key) is not None

    def sensitivity(self, key: ProfileKey, least_mem_gib: float = 0.0) -> Sensitivity | None:
        """Return how a job's throughput follows the CPUs and memory of each of its GPUs, None while unknown."""
        found = self._sensitivity_of(key)
        if found is None:
            return None
        try:
            return sensitivity_of(found, key.gpu_count, least_mem_gib)
        except UNUSABLE as error:
            log.warning("the sensitivity of %s is not used: %s", found.name, error)
            return None

    def _sensitivity_of(self, key: ProfileKey) -> SensitivityProfile | None:
        """Return the record under the key, else under the model: of its user, else a published one."""
        if not self.sensitivities:
            return None
        names = (name for each in key.lookup_order for name in (str(each), each.name))
        return next((self.sensitivities[name] for name in names if name in self.sensitivities), None)


def sensitivity_of(known: SensitivityProfile, gpu_count: int = 1, least_mem_gib: float = 0.0) -> Sensitivity:
    """Convert a stored sensitivity. Pure.

    What measurements cannot tell from the greatest throughput counts as saturated: otherwise noise would keep a job
    from giving up CPUs that do nothing for it.

    It was measured on one GPU. Each GPU of a larger job is taken to want the same CPUs; the job's GPUs share one
    cache of the dataset and the bandwidth of its storage.

    Raises:
        TraitError: The stored figures make no sensitivity.
        SensitivityError: The dataset's figures make no sense.
    """
    process_gib = known.process_gib or 0.0
    cpus = sorted({1, *(point.cpus for point in known.cpu.points)})
    enough = (1 - _SAME) * known.cpu.throughput(cpus[-1])
    at_full = [min(known.cpu.throughput(count), enough) for count in cpus]
    best = min(known.cpu.throughput(known.cpu.saturating_cpus), enough)
    if known.dataset is None:
        caches_gib, needed_gib = [0.0], 0.0
        rows: list[tuple[float, ...]] = [(value,) for value in at_full]
    else:
        dataset = _shared(known.dataset, gpu_count)
        needed_gib = saturating_cache_gib(dataset, best)
        caches_gib = sorted({*cache_sizes(dataset), needed_gib})
        rows = [tuple(throughput(dataset, value, gib) for gib in caches_gib) for value in at_full]
    demand = Demand(float(known.cpu.saturating_cpus), max(process_gib + needed_gib, least_mem_gib))
    return Sensitivity(
        tuple(float(count) for count in cpus), tuple(process_gib + gib for gib in caches_gib), tuple(rows), demand
    )


def _shared(dataset: Dataset, gpu_count: int) -> Dataset:
    """One GPU's part of the dataset and of its storage's bandwidth."""
    if gpu_count < 1:
        raise TraitError(f"a job with {gpu_count} GPUs has no share of a dataset")
    part_gib = dataset.dataset_gib / gpu_count
    return replace(
        dataset,
        dataset_gib=part_gib,
        batch_mib=min(dataset.batch_mib, part_gib * MIB_PER_GIB),
        storage_mib_per_s=dataset.storage_mib_per_s / gpu_count,
    )


def derived_for(job: Job, profile: StageProfile | None, nodes: NodeIndex) -> Sensitivity | None:
    """Derive a sensitivity from a job's stage profile, for where none was measured; None where there is no profile.

    Its dry run had the CPUs that the job asks for; the demand is never below them, for a loader that works ahead
    hides from the stages how many CPUs it needs.
    """
    if profile is None or profile.is_estimate:
        return None
    gpu_count = max(1, job.gpu_count)
    asked = Demand(job.cpu_count / gpu_count, job.mem_per_node_mib * max(1, job.node_count) / gpu_count / MIB_PER_GIB)
    node_cpus = nodes.most_cpus.get(job.partition)
    most_cpus = asked.cpus if node_cpus is None else node_cpus / max(1, job.gpus_per_node)
    return _derived(profile, asked, most_cpus)


@lru_cache(maxsize=8192)
def _derived(profile: StageProfile, asked: Demand, most_cpus: float) -> Sensitivity | None:
    """One object for all jobs of a model that ask for the same: it holds a hundred numbers."""
    derived = derived_sensitivity(profile, asked, most_cpus)
    if derived is None:
        return None
    demand = Demand(max(derived.demand.cpus, asked.cpus), max(derived.demand.mem_gib, asked.mem_gib))
    return replace(derived, demand=demand)


def batch_model(
    key: ProfileKey, profiles: Mapping[ProfileKey, StageProfile], fits: Mapping[str, LinearFit], accumulate: int
) -> BatchModel | None:
    """Return SJF-BSBF's model of a job, None where its batch size or its times over batch sizes are unknown."""
    profile = profiles.get(key)
    if profile is None or key.batch_size < 1:
        return None
    family = _family(key, profiles)
    stored = (fits.get(computation_name(each)) for each in key.lookup_order)
    try:
        times = next(filter(None, stored), None) or fit_computation(family)
        fixed_gib, per_sample_gib = _memory(profile, family)
        return BatchModel(
            batch_size=key.batch_size,
            compute_fixed_s=times.fixed_s,
            compute_per_sample_s=times.per_unit_s,
            communicate_s=profile.network_busy_s if key.gpu_count > 1 else 0.0,
            overlap_exponent=overlap_exponent(profile) or 1.0,
            fixed_mem_gib=fixed_gib,
            mem_gib_per_sample=per_sample_gib,
            max_accumulate_steps=accumulate,
        )
    except UNUSABLE as error:
        log.debug("%s has no batch model: %s", key, error)
        return None


def interference_table(
    waiting: Iterable[ProfileKey],
    running: Iterable[ProfileKey],
    known: Mapping[ProfileKey, StageProfile],
    traits: KnownTraits,
    *,
    turns_only: bool = False,
) -> InterferenceTable:
    """Return speeds of all models beside those that run: measured and learned ones first, estimates from profiles else.

    A group on one GPU finds out by itself whether turns suit it (`discipline: auto`), so where a pair is known both in
    turns and without, the better counts. On several GPUs all take turns.

    No job joins one that has not started, so a long queue costs only its models times the running ones.
    A table tells models apart by their names, which say whose they are. Of a model's several profiles the least key's
    counts.
    """
    at_work = _by_model(running, known)
    everybody = _by_model((*at_work.values(), *waiting), known)
    measured = by_pair(traits.pairs_in_turns), by_pair(traits.pairs)
    of_user: dict[str, dict[str, ProfileKey]] = defaultdict(dict)
    for model, key in everybody.items():
        of_user[key.user][model] = key
    rows = [
        _pair(a, b, known, measured, turns_only=turns_only or a.gpu_count > 1)
        for model, a in at_work.items()
        for other, b in (sorted((of_user[a.user] | of_user[""]).items()) if a.user else everybody.items())
        if other not in at_work or model <= other
    ]
    return InterferenceTable(tuple(rows))


def _by_model(keys: Iterable[ProfileKey], known: Mapping[ProfileKey, StageProfile]) -> dict[str, ProfileKey]:
    found: dict[str, ProfileKey] = {}
    for key in sorted(set(keys)):
        if key in known:
            found.setdefault(key.name, key)
    return found


def _pair(
    a: ProfileKey,
    b: ProfileKey,
    known: Mapping[ProfileKey, StageProfile],
    measured: Iterable[Pairs],
    *,
    turns_only: bool,
) -> PairSpeed:
    """Return the speeds of a pair."""
    found = [pair for each in measured if (pair := find(each, a, b)) is not None]
    speeds = [(1 / pair.a.ratio, 1 / pair.b.ratio) for pair in found]
    if not speeds:
        speeds = [(1 / estimated_ratio(known[a], known[b]),) * 2]
    return PairSpeed(a.name, b.name, *(speeds[0] if turns_only else max(speeds, key=sum)))


def _family(key: ProfileKey, profiles: Mapping[ProfileKey, StageProfile]) -> list[StageProfile]:
    """The measured profiles of a model with all its batch sizes: its user's own, published ones where there is none."""
    alike = (item for item in profiles.values() if item.key.serves(key.user) and not item.is_estimate)
    model = key.model, key.gpu_count, key.gpu_type
    near = {item.key: item for item in alike if (item.key.model, item.key.gpu_count, item.key.gpu_type) == model}
    return [item for item in near.values() if item.key.user == key.user or replace(item.key, user=key.user) not in near]


def _memory(profile: StageProfile, family: Iterable[StageProfile]) -> tuple[float, float]:
    """GiB of GPU memory whatever the batch size, and per sample; all of it is fixed where one size is known."""
    points = [Point(item.key.batch_size, item.gpu_mem_gib) for item in family if item.gpu_mem_gib > 0]
    try:
        line = fit_line(points, "profiles with a known GPU memory")
    except FitError:
        return profile.gpu_mem_gib, 0.0
    return line.fixed_s, line.per_unit_s


def with_measured_pairs(request: PlanRequest, policy: Policy, measured: Sequence[Interference]) -> PlanRequest:
    """Return the request with the speeds of measured pairs, for a policy whose groups may share without turns.

    Estimates are left out: they can't tell whether turns help.
    """
    if not policy.plain_groups:
        return request
    everybody = chain(request.jobs, *(unit.members for unit in request.running))
    keys = {job.profile.key for job in everybody if job.profile is not None and job.gpu_count == 1}
    rows = _rows(keys, measured)
    return replace(request, interference=InterferenceTable(rows) if rows else None)


def _rows(keys: set[ProfileKey], measured: Sequence[Interference]) -> tuple[PairSpeed, ...]:
    """Pairs of models of which every two keys were measured, each model with its least speed.

    A table tells models apart by name alone: an unmeasured batch size must not pass for a measured one.
    """
    family: dict[str, list[ProfileKey]] = defaultdict(list)
    for key in sorted(keys):
        family[key.name].append(key)
    speeds = _speeds_of(keys, by_pair(measured))
    names = sorted({(a.name, b.name) for a, b in speeds if a.name <= b.name})
    rows = (_row(family[first], family[second], speeds) for first, second in names)
    return tuple(row for row in rows if row is not None)


def _speeds_of(keys: set[ProfileKey], measured: Pairs) -> _Speeds:
    """The speeds of every two keys that were measured, or whose published ones were, in either order."""
    users: dict[ProfileKey, list[ProfileKey]] = defaultdict(list)
    for key in sorted(keys):
        for each in key.lookup_order:
            users[each].append(key)
    near = {pair for a, b in measured for pair in product(users.get(a, ()), users.get(b, ()))}
    speeds: dict[tuple[ProfileKey, ProfileKey], tuple[float, float]] = {}
    for a, b in sorted(near):
        item = find(measured, a, b) if a.serves(b.user) or b.serves(a.user) else None
        if item is not None:
            speeds |= {(b, a): (1 / item.b.ratio, 1 / item.a.ratio), (a, b): (1 / item.a.ratio, 1 / item.b.ratio)}
    return speeds


def _row(first: Sequence[ProfileKey], second: Sequence[ProfileKey], speeds: _Speeds) -> PairSpeed | None:
    found = [speeds.get(pair) for pair in product(first, second)]
    known = [pair for pair in found if pair is not None]
    if len(known) < len(found):
        return None
    return PairSpeed(first[0].name, second[0].name, min(a for a, _ in known), min(b for _, b in known))


def sensitivity_in(measured: Mapping[str, Any], profile: StageProfile, asked_cpus: int) -> SensitivityProfile | None:
    """Return a dry run's figures of CPUs and dataset; None where its figures of CPUs cannot be true."""
    told = measured.get(SWEEP)
    if not isinstance(told, Mapping):
        return None
    try:
        cpu = sweep_in(told, asked_cpus)
        return SensitivityProfile(
            str(profile.key),
            profile.measured_at,
            cpu,
            dataset=_dataset_in(measured, profile),
            process_gib=profile.detail.host_mem_gib,
        )
    except (SensitivityError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        log.warning("what the dry run of %s says of its CPUs cannot be true: %s", profile.key, error)
        return None


def _dataset_in(measured: Mapping[str, Any], profile: StageProfile) -> Dataset | None:
    """The dataset that a script keeps in `muri.cache`; None where it has none, or figures that cannot be true."""
    told = measured.get(READS)
    if not isinstance(told, Mapping):
        return None
    try:
        item_mib = float(told["item_bytes"]) / MIB
        dataset_mib, batch_mib = float(told["items"]) * item_mib, float(told["batch_items"]) * item_mib
        rate, overlap = float(told["bytes_per_s"]) / MIB, _overlap(profile, workers=told["workers"] is True)
        return Dataset(dataset_mib / MIB_PER_GIB, min(batch_mib, dataset_mib), rate, overlap)
    except (SensitivityError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        log.warning("what the dry run of %s says of its dataset cannot be true: %s", profile.key, error)
        return None


def _overlap(profile: StageProfile, *, workers: bool) -> float:
    """How much of its reading a job hides: all where workers prefetch, whose work the stages do not show."""
    if workers or profile.detail.busy_s is None:
        return float(workers)
    return measured_overlap(profile.iteration_s, profile.load_s, profile.detail.busy_s[0])
