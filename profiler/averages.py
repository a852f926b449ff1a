"""What stands in for a model of which nothing is known: the mean of the site's models, else a guess. Pure."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import fmean, geometric_mean
from typing import Final

from muri.profiler.records import ProfileKey, StageProfile

GUESSED_SHARES: Final = (1 / 6, 1 / 6, 1 / 2, 1 / 6)
"""Of a model at a site that knows none: training keeps the GPU busy at least as long as anything else."""

GUESSED_ITERATION_S: Final = 0.3


def unknown_model(known: Iterable[StageProfile], key: ProfileKey) -> StageProfile:
    """Return what a model of which nothing is known is planned with, until it has been measured.

    Each user's models count as one, so that nobody's many models, or odd ones, make the mean. The shares of an
    iteration are averaged, not the seconds, in which a few slow models would outweigh all others. `GUESSED_SHARES`
    count like one more model: the first one that is known says little of the next.

    Args:
        known: The site's profiles.
        key: The model's.
    """
    measured = sorted((each for each in known if not each.is_estimate), key=lambda each: each.key.user)
    alike = [each for each in measured if each.key.gpu_count == key.gpu_count]
    users = [list(each) for _, each in groupby(alike or measured, lambda each: each.key.user)]
    if not users:
        return _profile(key, _on_gpus(GUESSED_SHARES, key.gpu_count), GUESSED_ITERATION_S, "guess")
    mean = [fmean(column) for column in zip(*map(_shares, users), strict=True)]
    count = sum(map(len, users))
    shares = [(count * share + guess) / (count + 1) for share, guess in zip(mean, GUESSED_SHARES, strict=True)]
    iteration_s = geometric_mean(geometric_mean(each.iteration_s for each in user) for user in users)
    return _profile(key, _on_gpus(shares, key.gpu_count), iteration_s, "average")


def _shares(profiles: Sequence[StageProfile]) -> list[float]:
    """The mean share of an iteration that each stage has."""
    each = ([seconds / profile.iteration_s for seconds in profile.stage_s] for profile in profiles)
    return [fmean(column) for column in zip(*each, strict=True)]


def _on_gpus(shares: Sequence[float], gpu_count: int) -> Sequence[float]:
    """One GPU exchanges no gradients: the GPU has that time."""
    if gpu_count > 1:
        return shares
    load, preprocess, propagate, synchronize = shares
    return (load, preprocess, propagate + synchronize, 0.0)


def _profile(key: ProfileKey, shares: Sequence[float], iteration_s: float, source: str) -> StageProfile:
    # Stages that overlap can add up to more than the iteration, which they then fill.
    whole = max(1.0, sum(shares))
    load_s, preprocess_s, propagate_s, synchronize_s = (iteration_s * share / whole for share in shares)
    return StageProfile(key, load_s, preprocess_s, propagate_s, synchronize_s, iteration_s, source=source)
