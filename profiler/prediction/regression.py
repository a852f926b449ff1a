"""Boosted trees from a model's features to its stage shares, utilisation and iteration time (Horus, section 4.2)."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from muri.profiler.prediction.documents import Example
from muri.profiler.prediction.errors import LearnerMissingError
from muri.profiler.prediction.features import GraphFeatures
from muri.profiler.prediction.targets import TARGETS, Array, Target

COVERAGE: Final = 0.9
"""How often the interval should hold the true value."""

FOLDS: Final = 5
SEED: Final = 6
Learner = Callable[[], Any]


class Estimate(NamedTuple):
    """A predicted value with its interval, which is meant to hold the truth nine times in ten."""

    value: float
    low: float
    high: float


class Fitted(NamedTuple):
    """What was learnt of a target.

    Attributes:
        target: Which.
        model: Predicts it on the scale on which it is learnt.
        below: What the truth may be below the prediction on that scale, as a negative number.
        above: What it may be above.
    """

    target: Target
    model: Any
    below: float
    above: float

    def estimate(self, features: GraphFeatures) -> Estimate:
        """Value and interval in the target's own unit."""
        learnt = float(self.model.predict(np.array([features.vector()]))[0])
        ends = (learnt, min(learnt, learnt + self.below), max(learnt, learnt + self.above))
        return Estimate(*(float(self.target.value(end)) for end in ends))


def trees() -> Any:
    """The learner: many small trees, each on half of the examples and a third of the features.

    Raises:
        LearnerMissingError: scikit-learn is not installed.
    """
    try:
        from sklearn.ensemble import GradientBoostingRegressor  # -- an extra, and slow to load
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
    """Learn every target; the same examples give the same result to the bit, and are learnt once in a process."""
    fitted: dict[str, Fitted] = {}
    for target in TARGETS:
        outputs = target.learnt(examples)
        same = (item for item in fitted.values() if np.array_equal(item.target.learnt(examples), outputs))
        twin = next(same, None)  # without a GPU, utilisation is the share of propagate
        fitted[target.name] = twin._replace(target=target) if twin else fit(target, examples)
    return fitted


def fit(target: Target, examples: Sequence[Example]) -> Fitted:
    """Learn one target; the interval comes from models of families that were held out (cross-conformal)."""
    inputs, outputs = vectors(examples), target.learnt(examples)
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
    """The mean of what it saw, whatever the features."""

    def __init__(self) -> None:
        self._mean = 0.0

    def fit(self, inputs: Array, outputs: Array) -> "Constant":
        """Take the mean."""
        self._mean = float(outputs.mean())
        return self

    def predict(self, inputs: Array) -> Array:
        """The mean for each row."""
        return np.full(len(inputs), self._mean)
