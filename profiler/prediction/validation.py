"""How well is predicted: leave-one-model-out cross-validation beside simpler predictors."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from muri.profiler.prediction.documents import Example
from muri.profiler.prediction.errors import LearnerMissingError
from muri.profiler.prediction.regression import Constant, Learner, fit, folds, held_out, trees, vectors
from muri.profiler.prediction.targets import TARGETS, Array, Target


class Score(NamedTuple):
    """The error of one predictor for one target.

    Attributes:
        target: Name of the target.
        unit: Of the errors.
        predictor: "trees", "linear" or "mean".
        rmsle: Root mean square of log(1 + predicted) − log(1 + measured), both in the unit.
        mae: Mean absolute error in the unit.
    """

    target: str
    unit: str
    predictor: str
    rmsle: float
    mae: float


def linear() -> Any:
    """Ridge regression on standardised features, its strength chosen by cross-validation."""
    try:
        from sklearn.linear_model import RidgeCV  # noqa: PLC0415 -- an extra
        from sklearn.pipeline import make_pipeline  # noqa: PLC0415
        from sklearn.preprocessing import StandardScaler  # noqa: PLC0415
    except ImportError as error:
        raise LearnerMissingError(str(error)) from error
    return make_pipeline(StandardScaler(), RidgeCV(alphas=(1.0, 3.0, 10.0, 30.0, 100.0)))


PREDICTORS: Final[dict[str, Learner]] = {"trees": trees, "linear": linear, "mean": Constant}


def leave_one_model_out(examples: Sequence[Example]) -> tuple[Score, ...]:
    """Scores of all targets and predictors; each model family is predicted from the others alone."""
    fold = folds(examples, count=len(examples))
    return tuple(
        _score(target, name, examples, fold)
        for target in TARGETS
        for name in PREDICTORS
        if np.ptp(target.learnt(examples)) > 0
    )


def _score(target: Target, name: str, examples: Sequence[Example], fold: Array) -> Score:
    inputs, outputs = vectors(examples), target.learnt(examples)
    found = held_out(PREDICTORS[name], inputs, outputs, fold)
    rmsle = float(np.sqrt(np.mean((found - outputs) ** 2)))
    mae = float(np.mean(np.abs(target.value(found) - target.value(outputs)))) * target.per_unit
    return Score(target.name, target.unit, name, rmsle, mae)


def covered(target: Target, examples: Sequence[Example]) -> float:
    """Share of measured values that lie in the interval predicted from the other families."""
    fold = folds(examples, count=len(examples))
    inside = 0
    for one in np.unique(fold):
        fitted = fit(target, [item for item, its in zip(examples, fold, strict=True) if its != one])
        for item in (item for item, its in zip(examples, fold, strict=True) if its == one):
            estimate = fitted.estimate(item.features)
            inside += estimate.low <= target.of(item) <= estimate.high
    return inside / len(examples)
