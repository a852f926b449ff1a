"""How far the estimate of an unmeasured pair, ξ = 1 + Σ u_a·u_b, is from what happens.

Two checks. Simulated: two jobs that go round their stages share each resource they meet at in halves, event by event;
the estimate takes their meetings for independent, which jobs with equal rhythms are not. Published: the pairs that
Gavel measured on a V100. Its table has no stage times, so the estimate itself cannot be made from it; what is checked
is the formula: each model gets the one GPU share that fits best, on nine tenths of the pairs, and predicts the rest.
No estimate from profiles could do better than that by this formula.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from muri.profiler.interference.models import estimated_ratio
from muri_lab.benchmarks.machine import describe_machine
from muri_lab.benchmarks.pair_model import GAVEL, Floats, gavel_pairs, random_profiles, simulate

RESULT = Path(__file__).parent / "results" / "pair_estimate.json"
SEED = 1
JOBS = 40
FOLDS = 10


def errors(estimates: Sequence[float], truths: Sequence[float]) -> dict[str, float]:
    """Relative errors and the root mean square of the logarithm of the ratio."""
    ratio = np.asarray(estimates) / np.asarray(truths)
    return {
        "values": len(ratio),
        "median_error_percent": round(float(np.median(np.abs(ratio - 1))) * 100, 2),
        "p90_error_percent": round(float(np.quantile(np.abs(ratio - 1), 0.9)) * 100, 2),
        "rms_log_error": round(float(np.sqrt(np.mean(np.log(ratio) ** 2))), 4),
    }


def simulated() -> dict[str, Any]:
    """All pairs of the random jobs."""
    estimates, truths = [], []
    for a, b in itertools.combinations(random_profiles(JOBS), 2):
        estimates += [estimated_ratio(a, b)] * 2
        truths += simulate(a, b)
    mean = float(np.exp(np.mean(np.log(truths))))
    return {"estimate": errors(estimates, truths), "always the mean": errors([mean] * len(truths), truths)}


def product(shares: Floats, models: NDArray[np.int64]) -> Floats:
    """The estimate with one share for each model: the same ratio for both."""
    ratio = 1 + shares[models[:, 0]] * shares[models[:, 1]]
    return np.column_stack([ratio, ratio])


def asymmetric(figures: Floats, models: NDArray[np.int64]) -> Floats:
    """For comparison: each model has a sensitivity and a pressure of its own."""
    sensitivity, pressure = np.split(figures, 2)
    a, b = models.T
    return 1 + np.column_stack([sensitivity[a] * pressure[b], sensitivity[b] * pressure[a]])


def cross_validated(
    form: Callable[[Floats, NDArray[np.int64]], Floats], per_model: int, models: NDArray[np.int64], ratios: Floats
) -> dict[str, float]:
    """Fit on nine tenths of the pairs, predict the rest."""
    order = np.random.default_rng(SEED).permutation(len(models))
    predicted = np.empty_like(ratios)
    figures = per_model * (int(models.max()) + 1)
    for fold in np.array_split(order, FOLDS):
        kept = np.setdiff1d(order, fold)

        def off(values: Floats, kept: NDArray[np.int64] = kept) -> Floats:
            return np.asarray(np.log(form(values, models[kept]) / ratios[kept]).ravel(), dtype=np.float64)

        high = 1.0 if per_model == 1 else 10.0
        fit = least_squares(off, np.full(figures, 0.5), bounds=(0.0, high))
        predicted[fold] = form(fit.x, models[fold])
    return errors(predicted.ravel().tolist(), ratios.ravel().tolist())


def published() -> dict[str, Any]:
    """The formula against Gavel's table, or why not."""
    if not GAVEL.exists():
        return {"left out": f"{GAVEL.name} is not there"}
    models, ratios = gavel_pairs(GAVEL.read_text().splitlines())
    mean = float(np.exp(np.log(ratios).mean()))
    return {
        "pairs": len(models),
        "models": int(models.max()) + 1,
        "ratios_above_2_percent": round(float((ratios > 2).mean()) * 100, 1),
        "one share per model": cross_validated(product, 1, models, ratios),
        "sensitivity and pressure per model": cross_validated(asymmetric, 2, models, ratios),
        "always the mean": errors([mean] * ratios.size, ratios.ravel().tolist()),
    }


@click.command()
@click.option("--write", is_flag=True, help=f"Write {RESULT.name}.")
def main(write: bool) -> None:
    """Check the estimate of unmeasured pairs."""
    result = {"machine": describe_machine(), "simulated": simulated(), "published (Gavel, V100)": published()}
    text = json.dumps(result, indent=2)
    click.echo(text)
    if write:
        RESULT.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
