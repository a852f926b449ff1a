"""What stands in for a model of which nothing is known: what is known of the site's others, else a guess. Pure."""

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from statistics import fmean, median
from typing import Final

from muri.profiler.records import ProfileKey, StageProfile

GUESSED_SHARES: Final = (1 / 6, 1 / 6, 1 / 2, 1 / 6)
"""Of a model at a site that knows none: training keeps the GPU busy at least as long as anything else."""

GUESSED_ITERATION_S: Final = 0.3

_Figures = tuple[float, ...]
"""The share of an iteration that each stage has, and the logarithm of its seconds."""

_GUESS: Final[_Figures] = (*GUESSED_SHARES, math.log(GUESSED_ITERATION_S))


def unknown_models(known: Iterable[StageProfile], keys: Collection[ProfileKey]) -> dict[ProfileKey, StageProfile]:
    """Return what models of which nothing is known are planned with, until they have been measured.

    The user's own models and published ones are averaged. Of other users, who may have had anything measured, each has
    one vote, as the guess has one: the median of these counts like one model more. The shares of an iteration are
    averaged, not the seconds, in which a few slow models would outweigh all others.

    Args:
        known: The site's profiles.
        keys: The models'.
    """
    measured = sorted((each for each in known if not each.is_estimate), key=lambda each: each.key.user)
    found = {}
    for gpu_count in sorted({key.gpu_count for key in keys}):
        alike = [each for each in measured if each.key.gpu_count == gpu_count] or measured
        users = {user: list(map(_figures, each)) for user, each in groupby(alike, lambda each: each.key.user)}
        votes = {user: _mean(models) for user, models in users.items()}
        for key in (key for key in keys if key.gpu_count == gpu_count):
            own = {"", key.user}
            site = _median([_GUESS, *(vote for user, vote in votes.items() if user not in own)])
            trusted = [figures for user in sorted(own) for figures in users.get(user, ())]
            *shares, _ = _mean([*trusted, site])
            iteration_s = math.exp(_mean(trusted or [site])[-1])
            found[key] = _profile(key, _on_gpus(shares, gpu_count), iteration_s, "average" if alike else "guess")
    return found


def _figures(profile: StageProfile) -> _Figures:
    return (*(seconds / profile.iteration_s for seconds in profile.stage_s), math.log(profile.iteration_s))


def _mean(models: Sequence[_Figures]) -> _Figures:
    return tuple(fmean(column) for column in zip(*models, strict=True))


def _median(votes: Sequence[_Figures]) -> _Figures:
    return tuple(median(column) for column in zip(*votes, strict=True))


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
