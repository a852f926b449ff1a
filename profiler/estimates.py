"""The best that is known of a model: measured, else scaled from other GPU counts, else predicted."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from muri.profiler.bandwidth import bandwidths
from muri.profiler.prediction.documents import all_features
from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.scaling import scale
from muri.profiler.store import ProfileStore


@dataclass(frozen=True, slots=True)
class ProfileEstimate:
    """An estimated profile and what it rests on.

    Attributes:
        profile: Its `source` says whether it is scaled or predicted.
        basis: What it rests on, a sentence each.
        interval_s: Least and most seconds of each stage and of the iteration, right nine times in ten.
    """

    profile: StageProfile
    basis: tuple[str, ...]
    interval_s: tuple[tuple[float, float], ...]


def best_known(store: ProfileStore, key: ProfileKey) -> StageProfile | None:
    """The measured profile of a key, else an estimate, else None.

    An estimate's source is "scaled" (from another GPU count) or "predicted" (from the model's graph); it
    serves for planning until the dry run has measured.

    Raises:
        StoreError: The store cannot be read.
    """
    stored = store.get(key)
    if stored is not None and not stored.is_estimate:
        return stored
    estimate = estimated(store, key)
    return estimate.profile if estimate else stored


def estimated(store: ProfileStore, key: ProfileKey) -> ProfileEstimate | None:
    """What would be estimated of a key, whether it was measured or not; None when nothing is known."""
    scaled = scale(store.list(), key, bandwidths(store))
    if scaled is not None:
        return ProfileEstimate(scaled.profile, scaled.basis, scaled.interval_s)
    from muri.profiler.prediction.estimate import prediction_of  # -- loads NumPy

    prediction = prediction_of(store, key)
    if prediction is None:
        return None
    basis = f"learnt from {prediction.profiles} measured profiles of {prediction.families} families of models"
    return ProfileEstimate(
        prediction.profile(key), ("predicted from the model's graph", basis), prediction.interval_s()
    )


def estimates_of(store: ProfileStore, keys: Iterable[ProfileKey]) -> dict[ProfileKey, StageProfile]:
    """Estimates of those keys that were not measured and can be estimated; reads the store once for all.

    Raises:
        StoreError: The store cannot be read.
    """
    families: dict[ProfileKey, list[StageProfile]] = {}
    for item in store.list():
        families.setdefault(replace(item.key, gpu_count=1), []).append(item)
    known, modelled = bandwidths(store), {key.model for key in keys_with_features(store)}
    found = {}
    for key in keys:
        family = families.get(replace(key, gpu_count=1), [])
        if any(item.key == key and not item.is_estimate for item in family):
            continue
        scaled = scale(family, key, known)
        estimate = scaled.profile if scaled else _predicted(store, key) if key.model in modelled else None
        if estimate is not None:
            found[key] = estimate
    return found


def why_estimated(profile: StageProfile) -> str:
    """What to tell people of a profile that is an estimate; "" of a measured one."""
    if not profile.is_estimate:
        return ""
    basis = "scaled from another number of GPUs" if profile.source == "scaled" else "predicted from the model's graph"
    return f"its profile is estimated ({basis}) until a dry run has measured it"


def _predicted(store: ProfileStore, key: ProfileKey) -> StageProfile | None:
    from muri.profiler.prediction.estimate import predict_profile  # -- loads NumPy

    return predict_profile(store, key)


def keys_with_features(store: ProfileStore) -> frozenset[ProfileKey]:
    """The keys whose model's graph is known; predicting others would only cost time."""
    return frozenset(item.key for item in all_features(store))
