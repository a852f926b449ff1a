"""What policies that share GPUs know of jobs: how times and memory follow the batch size, and how pairs do. Pure."""

import logging
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from muri.errors import MuriError
from muri.policies.speed.measured import InterferenceTable, PairSpeed
from muri.policies.traits import BatchModel
from muri.profiler.errors import FitError
from muri.profiler.interference.models import KIND as FITS
from muri.profiler.interference.models import (
    LinearFit,
    Point,
    computation_name,
    estimated_ratio,
    fit_computation,
    fit_line,
)
from muri.profiler.interference.ratios import KIND as PAIRS
from muri.profiler.interference.ratios import Interference, find
from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.store import Document, ProfileStore

ACCUMULATES: Final = "accumulates"
"""Kind of the documents that name models whose batches can be split."""

UNUSABLE: Final = (MuriError, ArithmeticError, TypeError, ValueError)
"""What figures of a stored document raise that are of another kind, or that cannot be true."""

log = logging.getLogger("muri.controller")


class DocumentSink(Protocol):
    """The part of the profile store that takes documents."""

    def put_document(self, kind: str, document: Document) -> None:
        """Store a document."""
        ...

    def remove_document(self, kind: str, name: str) -> bool:
        """Forget one."""
        ...


def note_accumulates(store: DocumentSink, profile: StageProfile, *, accumulates: bool) -> None:
    """Remember whether a model's script has said in its dry run that its batches can be split."""
    if accumulates:
        store.put_document(ACCUMULATES, Document(str(profile.key), profile.measured_at, {}))
    else:
        store.remove_document(ACCUMULATES, str(profile.key))


def read_accumulating(store: ProfileStore) -> frozenset[str]:
    """Read whose scripts have said so: texts of profile keys.

    Raises:
        StoreError: The store cannot be read.
    """
    return frozenset(document.name for document in store.documents(ACCUMULATES))


def read_fits(store: ProfileStore) -> dict[str, LinearFit]:
    """Read the stored fits over batch sizes, by name; one that cannot be understood is left out.

    Raises:
        StoreError: The store cannot be read.
    """
    found: dict[str, LinearFit] = {}
    for document in store.documents(FITS):
        try:
            found[document.name] = LinearFit.from_dict(document.body)
        except UNUSABLE as error:
            log.warning("fit %s is not used: %s", document.name, error)
    return found


def read_pairs(store: ProfileStore) -> tuple[Interference, ...]:
    """Read the measured pairs; one that cannot be understood is left out.

    Raises:
        StoreError: The store cannot be read.
    """
    found: list[Interference] = []
    for document in store.documents(PAIRS):
        try:
            found.append(Interference.from_dict(document.body))
        except UNUSABLE as error:
            log.warning("pair %s is not used: %s", document.name, error)
    return tuple(found)


def batch_model(
    key: ProfileKey, profiles: Mapping[ProfileKey, StageProfile], fits: Mapping[str, LinearFit], accumulate: int
) -> BatchModel | None:
    """Return SJF-BSBF's model of a job, None where its batch size or its times over batch sizes are unknown.

    Args:
        key: What the job is profiled under.
        profiles: Stored profiles.
        fits: Stored fits; without one, the model's profiles with other batch sizes are fitted.
        accumulate: Into how many micro-batches the job's script can split a batch at most.
    """
    profile = profiles.get(key)
    if profile is None or key.batch_size < 1:
        return None
    family = [item for item in profiles.values() if _same_but_for_batch(item.key, key) and not item.is_estimate]
    try:
        times = fits.get(computation_name(key)) or fit_computation(family)
        fixed_gib, per_sample_gib = _memory(profile, family)
        return BatchModel(
            batch_size=key.batch_size,
            compute_fixed_s=times.fixed_s,
            compute_per_sample_s=times.per_unit_s,
            communicate_s=profile.synchronize_s if key.gpu_count > 1 else 0.0,
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
    pairs: tuple[Interference, ...],
) -> InterferenceTable:
    """Return speeds of all models beside those that run: measured ones first, estimates from both profiles else.

    Nobody joins a job that has not started, so that a long queue costs no more than its models times those at work.
    A table tells models apart by name alone. Of a model's several profiles the least key's counts.

    Args:
        waiting: What waiting jobs are profiled under.
        running: The same of running ones.
        known: Stored profiles, and estimates.
        pairs: Measured pairs.
    """
    at_work = _by_model(running, known)
    everybody = _by_model((*at_work.values(), *waiting), known)
    rows = [
        _pair(a, b, known, pairs)
        for model, a in at_work.items()
        for other, b in everybody.items()
        if other not in at_work or model <= other
    ]
    return InterferenceTable(tuple(rows))


def _by_model(keys: Iterable[ProfileKey], known: Mapping[ProfileKey, StageProfile]) -> dict[str, ProfileKey]:
    found: dict[str, ProfileKey] = {}
    for key in sorted(set(keys)):
        if key in known:
            found.setdefault(key.model, key)
    return found


def _pair(
    a: ProfileKey, b: ProfileKey, known: Mapping[ProfileKey, StageProfile], pairs: tuple[Interference, ...]
) -> PairSpeed:
    measured = find(pairs, a, b)
    if measured is not None:
        return PairSpeed(a.model, b.model, 1 / measured.a.ratio, 1 / measured.b.ratio)
    speed = 1 / estimated_ratio(known[a], known[b])
    return PairSpeed(a.model, b.model, speed, speed)


def _same_but_for_batch(a: ProfileKey, b: ProfileKey) -> bool:
    return (a.model, a.gpu_count, a.gpu_type) == (b.model, b.gpu_count, b.gpu_type)


def _memory(profile: StageProfile, family: Iterable[StageProfile]) -> tuple[float, float]:
    """GiB of GPU memory whatever the batch size, and per sample; all of it is fixed where one size is known."""
    points = [Point(item.key.batch_size, item.gpu_mem_gib) for item in family if item.gpu_mem_gib > 0]
    try:
        line = fit_line(points, "profiles with a known GPU memory")
    except FitError:
        return profile.gpu_mem_gib, 0.0
    return line.fixed_s, line.per_unit_s
