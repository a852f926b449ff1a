"""Leave-one-model-out cross-validation of the predictor, beside simpler predictors."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from muri_lab.prediction.features import Example
from muri_lab.prediction.predictor import (
    TARGETS,
    Array,
    Constant,
    Learner,
    LearnerMissingError,
    Target,
    folds,
    held_out,
    margins,
    trees,
    vectors,
)


def linear() -> Any:
    """Ridge regression on standardised features, its strength chosen by cross-validation.

    Raises:
        LearnerMissingError: scikit-learn is not installed.
    """
    try:
        from sklearn.linear_model import RidgeCV  # an extra
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError as error:
        raise LearnerMissingError(str(error)) from error
    return make_pipeline(StandardScaler(), RidgeCV(alphas=(1.0, 3.0, 10.0, 30.0, 100.0)))


PREDICTORS: Final[dict[str, Learner]] = {"trees": trees, "linear": linear, "mean": Constant}


class Score(NamedTuple):
    """The error of one predictor for one target.

    Attributes:
        target: Name of the target.
        unit: Of the errors.
        predictor: One of `PREDICTORS`.
        rmsle: Root mean square of log(1 + predicted) − log(1 + measured), both in the unit.
        mae: Mean absolute error in the unit.
        covered: How often intervals made from the errors of the other models hold the measured value.
    """

    target: str
    unit: str
    predictor: str
    rmsle: float
    mae: float
    covered: float


def leave_one_model_out(examples: Sequence[Example]) -> tuple[Score, ...]:
    """Scores of all targets that vary, and of all predictors; a model family is predicted from the others alone.

    Raises:
        LearnerMissingError: scikit-learn is not installed.
    """
    varying = [target for target in TARGETS if np.ptp(target.learnt(examples)) > 0]
    return tuple(_score(target, name, examples) for target in varying for name in PREDICTORS)


def _score(target: Target, name: str, examples: Sequence[Example]) -> Score:
    outputs, fold = target.learnt(examples), folds(examples, count=len(examples))
    found = held_out(PREDICTORS[name], vectors(examples), outputs, fold)
    rmsle = float(np.sqrt(np.mean((found - outputs) ** 2)))
    mae = float(np.mean(np.abs(target.value(found) - target.value(outputs)))) * target.per_unit
    return Score(target.name, target.unit, name, rmsle, mae, _covered(outputs - found, fold))


def _covered(errors: Array, fold: Array) -> float:
    """Share of errors that lie within the margins that the other folds' errors give."""
    inside = np.zeros(len(errors), dtype=bool)
    for one in np.unique(fold):
        out = fold == one
        below, above = margins(errors[~out])
        inside[out] = (below <= errors[out]) & (errors[out] <= above)
    return float(inside.mean())
