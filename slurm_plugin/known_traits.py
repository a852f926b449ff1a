"""What the profile store knows of models beyond their stage profiles, as policies take it."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from muri.errors import MuriError
from muri.policies.allocation.demand import derived_sensitivity
from muri.policies.traits import Demand, Sensitivity, TraitError
from muri.policies.types import PlanJob
from muri.profiler.errors import CorruptStoreError
from muri.profiler.interference.models import LinearFit
from muri.profiler.interference.ratios import Interference
from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.sensitivity import record
from muri.profiler.sensitivity.bisection import DOUBT, RUN_SPREAD
from muri.profiler.sensitivity.memory_axis import Dataset, cache_sizes, saturating_cache_gib, throughput
from muri.profiler.store import ProfileStore
from muri.slurm_plugin.known_sharing import UNUSABLE, read_accumulating, read_fits, read_pairs
from muri.slurm_plugin.model import Job, Node

log = logging.getLogger("muri.controller")

_MIB_PER_GIB = 1024.0
_SAME = DOUBT * RUN_SPREAD


@dataclass(frozen=True, slots=True)
class KnownTraits:
    """What is stored of models, read once in a cycle.

    Attributes:
        sensitivities: As `muri profile sensitivity` stores them, by name: the model's, or a profile key's text.
        fits: Iteration times over batch sizes, by name.
        pairs: Models that were measured side by side.
        accumulating: Profile keys, as text, of scripts that have said that their batches can be split.
    """

    sensitivities: Mapping[str, record.SensitivityProfile] = field(default_factory=dict)
    fits: Mapping[str, LinearFit] = field(default_factory=dict)
    pairs: tuple[Interference, ...] = ()
    accumulating: frozenset[str] = frozenset()

    def is_measured(self, key: ProfileKey) -> bool:
        """Whether it was measured what CPUs do to a model."""
        return str(key) in self.sensitivities or key.model in self.sensitivities

    def sensitivity(self, key: ProfileKey, least_mem_gib: float = 0.0) -> Sensitivity | None:
        """Return how a job's throughput follows the CPUs and memory of each of its GPUs, None while unknown.

        Args:
            key: What the job is profiled under.
            least_mem_gib: Memory per GPU that the job is not to get less than.
        """
        found = self.sensitivities.get(str(key)) or self.sensitivities.get(key.model)
        if found is None:
            return None
        try:
            return sensitivity_of(found, key.gpu_count, least_mem_gib)
        except UNUSABLE as error:
            log.warning("the sensitivity of %s is not used: %s", found.name, error)
            return None


def gpu_utilization(profile: StageProfile | None) -> float | None:
    """Share of its GPUs' time that a model computes on them, as telemetry measured or the graph predicts it. Pure.

    None where neither is known; what a policy then makes of the stage times is its own business.
    """
    return None if profile is None else profile.detail.gpu_utilisation


def read_traits(store: ProfileStore) -> KnownTraits:
    """Read what is stored; what cannot be read costs no cycle.

    Raises:
        CorruptStoreError: The store is damaged, which the caller mends.
    """
    try:
        return KnownTraits(
            {found.name: found for found in _sensitivities(store)},
            read_fits(store),
            read_pairs(store),
            read_accumulating(store),
        )
    except CorruptStoreError:
        raise
    except MuriError as error:
        log.warning("this cycle plans without what is known of CPUs and memory: %s", error)
        return KnownTraits()


def _sensitivities(store: ProfileStore) -> Iterator[record.SensitivityProfile]:
    for document in store.documents(record.KIND):
        try:
            found = record.SensitivityProfile.from_document(document)
        except UNUSABLE as error:
            log.warning("sensitivity %s is not used: %s", document.name, error)
            continue
        if found.cpu.points:
            yield found


def sensitivity_of(known: record.SensitivityProfile, gpu_count: int = 1, least_mem_gib: float = 0.0) -> Sensitivity:
    """Convert a stored sensitivity. Pure.

    What measurements cannot tell from the greatest throughput counts as saturated: otherwise noise would keep a job
    from giving up CPUs that do nothing for it.

    It was measured on one GPU. Each GPU of a larger job is taken to want the same CPUs; the job's GPUs share one
    cache of the dataset and the bandwidth of its storage.

    Args:
        known: CPU curve as measured, memory by the cache model.
        gpu_count: GPUs of the job.
        least_mem_gib: Memory per GPU below which the demand is not to lie.

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
        batch_mib=min(dataset.batch_mib, part_gib * _MIB_PER_GIB),
        storage_mib_per_s=dataset.storage_mib_per_s / gpu_count,
    )


def with_derived(planned: PlanJob, job: Job, nodes: Iterable[Node]) -> PlanJob:
    """Let a job's measured stage profile stand in for a sensitivity that nobody measured. Pure.

    Its dry run had the CPUs that the job asks for; the demand is never below them, for a loader that works ahead
    hides from the stages how many CPUs it needs.
    """
    profile = planned.profile
    if planned.sensitivity is not None or profile is None or profile.is_estimate:
        return planned
    gpu_count = max(1, job.gpu_count)
    asked = Demand(job.cpu_count / gpu_count, job.mem_per_node_mib * max(1, job.node_count) / gpu_count / _MIB_PER_GIB)
    usable = [node for node in nodes if node.gpu_count and job.partition in node.partitions]
    most_cpus = max((node.cpu_count / max(1, job.gpus_per_node) for node in usable), default=asked.cpus)
    derived = derived_sensitivity(profile, asked, most_cpus)
    if derived is None:
        return planned
    demand = Demand(max(derived.demand.cpus, asked.cpus), max(derived.demand.mem_gib, asked.mem_gib))
    return replace(planned, sensitivity=replace(derived, demand=demand))
