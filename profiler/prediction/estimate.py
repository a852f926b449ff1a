"""Predictions from the store's own profiles: of a model's features, or of a key whose features are known."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from muri.profiler.prediction.documents import Example, KnownFeatures, all_features, examples
from muri.profiler.prediction.errors import (
    LEAST_FAMILIES,
    LEAST_PROFILES,
    LearnerMissingError,
    TooFewProfilesError,
)
from muri.profiler.prediction.features import GraphFeatures
from muri.profiler.prediction.memory import DEFAULT_OPTIMIZER, FRAMEWORK_GIB, MemoryEstimate, estimate_memory
from muri.profiler.prediction.regression import Estimate, fit_all, margins
from muri.profiler.prediction.targets import ITERATION, SHARES, UTILISATION
from muri.profiler.records import ProfileDetail, ProfileKey, StageProfile
from muri.profiler.store import ProfileStore

NO_GPU = "cpu"
"""The GPU type under which profiles of nodes without GPU are kept: they need no GPU memory."""

_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a model will need.

    Attributes:
        features: What it was predicted from.
        utilisation: Of the GPU as telemetry measures it; on nodes without GPU the share of propagate.
        shares: What each stage owns of the iteration, in the order of `STAGES`; the values sum to 1 at most.
        iteration_s: Seconds of an iteration.
        memory: Of the device, by formula.
        allocated_gib: What PyTorch allocates of it, between what the measured profiles needed compared with the
            formula; None where too few have a GPU's memory.
        profiles: How many measured profiles it rests on.
        families: Of how many model families.
    """

    features: GraphFeatures
    utilisation: Estimate
    shares: tuple[Estimate, ...]
    iteration_s: Estimate
    memory: MemoryEstimate
    allocated_gib: Estimate | None
    profiles: int
    families: int

    def profile(self, key: ProfileKey) -> StageProfile:
        """As a stage profile whose source is "predicted"."""
        load_s, preprocess_s, propagate_s, synchronize_s = (
            share.value * self.iteration_s.value for share in self.shares
        )
        on_gpu = key.gpu_type != NO_GPU
        return StageProfile(
            key,
            load_s,
            preprocess_s,
            propagate_s,
            synchronize_s,
            self.iteration_s.value,
            gpu_mem_gib=self.memory.allocated_gib if on_gpu else 0.0,
            source="predicted",
            detail=ProfileDetail(
                gpu_utilisation=self.utilisation.value if on_gpu else None,
                gradient_mib=self.features.gradient_bytes / _MIB,
            ),
        )

    def interval_s(self) -> tuple[tuple[float, float], ...]:
        """Least and most seconds of each stage, with the ends of share and iteration together, and of the iteration."""
        whole = self.iteration_s
        stages = ((share.low * whole.low, share.high * whole.high) for share in self.shares)
        return (*stages, (whole.low, whole.high))


def predict(features: GraphFeatures, known: Sequence[Example], optimizer: str = DEFAULT_OPTIMIZER) -> Prediction:
    """Predict from a model's features.

    Args:
        features: Of the model with its batch.
        known: What to learn from, all of one GPU type and count; `check_enough` says whether it suffices.
        optimizer: One of `memory.OPTIMIZER_STATES`.

    Raises:
        LearnerMissingError: scikit-learn is not installed.
        UsageError: The optimizer is not known.
    """
    fitted = fit_all(tuple(known))
    shares = _normalised([fitted[target.name].estimate(features) for target in SHARES])
    on_gpu = any(item.profile.key.gpu_type != NO_GPU for item in known)
    memory = estimate_memory(features, optimizer, FRAMEWORK_GIB if on_gpu else 0.0)
    return Prediction(
        features=features,
        utilisation=_at_most_one(fitted[UTILISATION.name].estimate(features)),
        shares=shares,
        iteration_s=fitted[ITERATION.name].estimate(features),
        memory=memory,
        allocated_gib=_memory_interval(memory, known, optimizer),
        profiles=len(known),
        families=_families(known),
    )


def check_enough(store: ProfileStore, gpu_type: str, gpu_count: int = 1) -> tuple[Example, ...]:
    """What can be learnt from for a GPU type and count.

    Raises:
        TooFewProfilesError: It is too little.
        FeaturesError: The store holds features that make no sense.
    """
    known = examples(store, gpu_type, gpu_count)
    if not _enough(known):
        others = sorted({f"{item.key.gpu_count} × {item.key.gpu_type}" for item in all_features(store)})
        raise TooFewProfilesError(len(known), _families(known), gpu_type, gpu_count, tuple(others))
    return known


def predict_profile(store: ProfileStore, key: ProfileKey) -> StageProfile | None:
    """The predicted profile of a key, for planning until there is a measured one; see `prediction_of`."""
    prediction = prediction_of(store, key)
    return None if prediction is None else prediction.profile(key)


def prediction_of(store: ProfileStore, key: ProfileKey) -> Prediction | None:
    """What is predicted of a key.

    Features of the same model with another batch size serve too, scaled. None where no features are known, where
    the store holds too little to learn from, or where scikit-learn is not installed.

    Raises:
        StoreError: The store cannot be read.
        FeaturesError: The store holds features that make no sense.
    """
    features = _features_for(all_features(store), key)
    known = examples(store, key.gpu_type, key.gpu_count)
    if features is None or not _enough(known):
        return None
    try:
        return predict(features, known)
    except LearnerMissingError:
        return None


def _features_for(known: Sequence[KnownFeatures], key: ProfileKey) -> GraphFeatures | None:
    """Those of the key, else of its model with the nearest batch size; a graph is the same on every GPU."""
    own = [item.features for item in known if item.key == key]
    if own or key.batch_size == 0:
        return own[0] if own else None
    same = [item.features for item in known if item.key.model == key.model]
    if not same:
        return None
    nearest = min(same, key=lambda item: max(item.batch_size / key.batch_size, key.batch_size / item.batch_size))
    return nearest.scaled(key.batch_size)


def _enough(known: Sequence[Example]) -> bool:
    return len(known) >= LEAST_PROFILES and _families(known) >= LEAST_FAMILIES


def _memory_interval(memory: MemoryEstimate, known: Sequence[Example], optimizer: str) -> Estimate | None:
    """The formula's value, and the range in which nine of ten measured profiles lie compared with it."""
    measured = [item for item in known if item.profile.gpu_mem_gib > 0]
    if not _enough(measured):
        return None
    formula = [estimate_memory(item.features, optimizer).allocated_gib for item in measured]
    least, most = margins(np.array([item.profile.gpu_mem_gib for item in measured]) / np.array(formula))
    value = memory.allocated_gib
    return Estimate(value, value * min(1.0, least), value * max(1.0, most))


def _families(known: Sequence[Example]) -> int:
    return len({item.family for item in known})


def _at_most_one(estimate: Estimate) -> Estimate:
    return Estimate(*(min(1.0, end) for end in estimate))


def _normalised(shares: Sequence[Estimate]) -> tuple[Estimate, ...]:
    """Shares whose values sum to 1 at most; each is learnt by itself and knows nothing of the others."""
    capped = [_at_most_one(share) for share in shares]
    excess = max(1.0, sum(share.value for share in capped))
    return tuple(Estimate(value := share.value / excess, min(share.low, value), share.high) for share in capped)
