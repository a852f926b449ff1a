"""Predictions from the store's profiles: boosted trees from a model's features to its stage shares, utilization and
iteration time (Horus, section 4.2), and the memory formula with the range that measured profiles give it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from muri.clock import MIB
from muri.errors import MuriError
from muri.profiler.estimates import Estimator, ProfileEstimate
from muri.profiler.records import STAGES, ProfileDetail, ProfileKey, StageProfile
from muri.profiler.store import ProfileStore
from muri.pythons import THE_LAB
from muri_lab.prediction.features import (
    DEFAULT_OPTIMIZER,
    FRAMEWORK_GIB,
    Example,
    GraphFeatures,
    KnownFeatures,
    MemoryEstimate,
    all_features,
    estimate_memory,
    examples,
)

COVERAGE: Final = 0.9  # How often the interval should hold the true value
FOLDS: Final = 5
SEED: Final = 6
Learner = Callable[[], Any]
Array = NDArray[np.float64]
PROPAGATE: Final = STAGES.index("propagate")
NO_GPU = "cpu"  # The GPU type of profiles from nodes without GPU: they need no GPU memory


LEAST_PROFILES: Final = 40
LEAST_FAMILIES: Final = 8  # With fewer, the trees predict worse than the mean does (docs/lab.md)


class PredictionError(MuriError):
    """Nothing can be predicted."""


class TooFewProfilesError(PredictionError):
    """The store holds too little to learn from."""

    def __init__(self, profiles: int, families: int, gpu_type: str, gpu_count: int, others: tuple[str, ...]) -> None:
        has = f" The store has some of: {', '.join(others)}." if others else ""
        super().__init__(
            f"too little to learn from for {gpu_count} × {gpu_type}: {profiles} measured profiles with features, of "
            f"{families} model families; {LEAST_PROFILES} of {LEAST_FAMILIES} are needed.{has} "
            "Profile the zoo on such a node: python -m muri_lab.benchmarks.profile_zoo --store STORE"
        )


class LearnerMissingError(PredictionError):
    """scikit-learn is not installed."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"predictions need scikit-learn, which cannot be imported ({reason}): {THE_LAB}")


@dataclass(frozen=True, slots=True)
class Target:
    """One figure to predict, learned as log(1 + unit · value), whose root mean square error is Horus's RMSLE."""

    name: str  # Such as "load_share"
    unit: str  # The unit of errors
    per_unit: float  # How many of the unit make one: 100 for shares in per cent, 1000 for seconds in milliseconds
    of: Callable[[Example], float]  # The measured value

    def learned(self, examples: Sequence[Example]) -> Array:
        """The measured values on the scale on which they are learned."""
        return np.log1p(self.per_unit * np.array([self.of(item) for item in examples], dtype=np.float64))

    def value(self, learned: Any) -> Any:
        """Back from that scale."""
        return np.maximum(np.expm1(learned), 0.0) / self.per_unit


def device_utilization(example: Example) -> float:
    """GPU utilization as telemetry measured it; on a node without GPU the share that propagate owns."""
    measured = example.profile.detail.gpu_utilization
    return _share(example, PROPAGATE) if measured is None else measured


def _share(example: Example, stage: int) -> float:
    """Return a stage's share of the iteration; where stages overlap, of their sum."""
    profile = example.profile
    return profile.stage_s[stage] / max(profile.iteration_s, sum(profile.stage_s))


def _share_target(index: int, stage: str) -> Target:
    return Target(f"{stage}_share", "%", 100.0, lambda example: _share(example, index))


class Estimate(NamedTuple):
    """A predicted value with its interval, which is meant to hold the truth nine times in ten."""

    value: float
    low: float
    high: float


class Fitted(NamedTuple):
    """The fit of a target."""

    target: Target  # Which
    model: Any  # Predicts it on the scale on which it is learned
    below: float  # How far the truth may lie below the prediction on that scale; negative
    above: float

    def estimate(self, features: GraphFeatures) -> Estimate:
        """Value and interval in the target's own unit."""
        learned = float(self.model.predict(np.array([features.vector()]))[0])
        ends = (learned, min(learned, learned + self.below), max(learned, learned + self.above))
        return Estimate(*(float(self.target.value(end)) for end in ends))


def trees() -> Any:
    """The learner: many small trees, each on half of the examples and a third of the features."""
    try:
        from sklearn.ensemble import GradientBoostingRegressor  # an extra, and slow to load
    except ImportError as error:
        raise LearnerMissingError(str(error)) from error
    return GradientBoostingRegressor(
        n_estimators=120,
        learning_rate=0.06,
        max_depth=3,
        subsample=0.5,
        max_features=0.3,
        min_samples_leaf=3,
        random_state=SEED,
    )


def vectors(examples: Sequence[Example]) -> Array:
    """The features of examples, a row each."""
    return np.array([item.features.vector() for item in examples], dtype=np.float64)


@lru_cache(maxsize=8)
def fit_all(examples: tuple[Example, ...]) -> dict[str, Fitted]:
    """Learn every target; the same examples give the same result to the bit, and a process learns them once."""
    fitted: dict[str, Fitted] = {}
    for target in TARGETS:
        outputs = target.learned(examples)
        same = (item for item in fitted.values() if np.array_equal(item.target.learned(examples), outputs))
        twin = next(same, None)  # without a GPU, utilization is the share of propagate
        fitted[target.name] = twin._replace(target=target) if twin else fit(target, examples)
    return fitted


def fit(target: Target, examples: Sequence[Example]) -> Fitted:
    """Learn one target; the interval comes from models of families that were held out (cross-conformal)."""
    inputs, outputs = vectors(examples), target.learned(examples)
    if np.ptp(outputs) == 0:  # nothing to learn, such as synchronize on one GPU
        return Fitted(target, Constant().fit(inputs, outputs), 0.0, 0.0)
    below, above = margins(outputs - held_out(trees, inputs, outputs, folds(examples)))
    return Fitted(target, trees().fit(inputs, outputs), below, above)


def margins(figures: Array) -> tuple[float, float]:
    """Between which figures the middle nine of ten lie."""
    tail = (1 - COVERAGE) / 2
    below, above = np.quantile(figures, (tail, 1 - tail))
    return float(below), float(above)


def folds(examples: Sequence[Example], count: int = FOLDS) -> Array:
    """The fold of each example; all of a model family are in the same one."""
    families = {family: number for number, family in enumerate(sorted({item.family for item in examples}))}
    return np.array([families[item.family] % count for item in examples], dtype=np.float64)


def held_out(make: Learner, inputs: Array, outputs: Array, fold: Array) -> Array:
    """Predictions of each example by a model that has not seen its fold."""
    found = np.empty_like(outputs)
    for one in np.unique(fold):
        out = fold == one
        found[out] = make().fit(inputs[~out], outputs[~out]).predict(inputs[out])
    return found


class Constant:
    """Predicts the mean, whatever the features."""

    def __init__(self) -> None:
        self._mean = 0.0

    def fit(self, inputs: Array, outputs: Array) -> "Constant":
        """Take the mean."""
        self._mean = float(outputs.mean())
        return self

    def predict(self, inputs: Array) -> Array:
        """The mean for each row."""
        return np.full(len(inputs), self._mean)


UTILIZATION: Final = Target("device_utilization", "%", 100.0, device_utilization)


SHARES: Final = tuple(_share_target(index, stage) for index, stage in enumerate(STAGES))


ITERATION: Final = Target("iteration", "ms", 1000.0, lambda example: example.profile.iteration_s)


TARGETS: Final = (UTILIZATION, *SHARES, ITERATION)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted needs of a model."""

    features: GraphFeatures
    utilization: Estimate  # Of the GPU as telemetry measures it; on nodes without GPU the share of propagate
    shares: tuple[Estimate, ...]  # of the iteration, in the order of `STAGES`; sum at most 1
    iteration_s: Estimate  # Seconds of an iteration
    memory: MemoryEstimate  # Of the device, by formula
    allocated_gib: Estimate | None  # PyTorch's part; None where too few profiles have a GPU's memory
    profiles: int  # How many measured profiles it rests on
    families: int  # Of how many model families

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
                gpu_utilization=self.utilization.value if on_gpu else None,
                gradient_mib=self.features.gradient_bytes / MIB,
            ),
        )

    def interval_s(self) -> tuple[tuple[float, float], ...]:
        """Least and most seconds of each stage, with the ends of share and iteration together, and of the iteration."""
        whole = self.iteration_s
        stages = ((share.low * whole.low, share.high * whole.high) for share in self.shares)
        return (*stages, (whole.low, whole.high))


def predict(features: GraphFeatures, known: Sequence[Example], optimizer: str = DEFAULT_OPTIMIZER) -> Prediction:
    """Predict from a model's features."""
    fitted = fit_all(tuple(known))
    shares = _normalized([fitted[target.name].estimate(features) for target in SHARES])
    on_gpu = any(item.profile.key.gpu_type != NO_GPU for item in known)
    memory = estimate_memory(features, optimizer, FRAMEWORK_GIB if on_gpu else 0.0)
    return Prediction(
        features=features,
        utilization=_at_most_one(fitted[UTILIZATION.name].estimate(features)),
        shares=shares,
        iteration_s=fitted[ITERATION.name].estimate(features),
        memory=memory,
        allocated_gib=_memory_interval(memory, known, optimizer),
        profiles=len(known),
        families=_families(known),
    )


def check_enough(store: ProfileStore, gpu_type: str, gpu_count: int = 1) -> tuple[Example, ...]:
    """Return the examples of a GPU type and count; raise TooFewProfilesError if they are too few."""
    known = examples(store, gpu_type, gpu_count)
    if not _enough(known):
        others = sorted({f"{item.key.gpu_count} × {item.key.gpu_type}" for item in all_features(store)})
        raise TooFewProfilesError(len(known), _families(known), gpu_type, gpu_count, tuple(others))
    return known


def prediction_of(store: ProfileStore, key: ProfileKey) -> Prediction | None:
    """Return the prediction for a key that is not measured; None without features, examples or scikit-learn.

    Features of the same model with another batch size serve too, scaled.
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
    own = {item.key: item.features for item in known if item.key in key.lookup_order}
    if own or key.batch_size == 0:
        return next((own[each] for each in key.lookup_order if each in own), None)
    same = [item.features for item in known if item.key.model == key.model and item.key.serves(key.user)]
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


def _normalized(shares: Sequence[Estimate]) -> tuple[Estimate, ...]:
    """Shares whose values sum to 1 at most; each is learned by itself and knows nothing of the others."""
    capped = [_at_most_one(share) for share in shares]
    excess = max(1.0, sum(share.value for share in capped))
    return tuple(Estimate(value := share.value / excess, min(share.low, value), share.high) for share in capped)


def estimate_of(store: ProfileStore, key: ProfileKey) -> ProfileEstimate | None:
    """The prediction for a key as an estimate; see `prediction_of`."""
    prediction = prediction_of(store, key)
    if prediction is None:
        return None
    learned = f"learned from {prediction.profiles} measured profiles of {prediction.families} families of models"
    return ProfileEstimate(
        prediction.profile(key), ("predicted from the model's graph", learned), prediction.interval_s()
    )


def keys_with_features(store: ProfileStore) -> frozenset[ProfileKey]:
    """The keys whose model's graph is known; predicting others would only cost time."""
    return frozenset(item.key for item in all_features(store))


ESTIMATOR: Final = Estimator(keys_with_features, estimate_of)
"""What the core finds by the entry point group `muri.estimators`."""
