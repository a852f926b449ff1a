"""Pauses between two questions to Slurm, for thousands of jobs that must not all ask at once. Pure."""

import random
from collections.abc import Iterator
from typing import Final

_SPREAD: Final = 0.2
"""By which share a pause may be shorter or longer."""


def growing_pauses(first_s: float, most_s: float, job_id: int) -> Iterator[float]:
    """Yield pauses, each twice as long as the one before, up to a limit, and all a little off by chance.

    Args:
        first_s: The first one.
        most_s: The limit.
        job_id: Whose pauses these are: the same job always has the same ones.
    """
    chance = random.Random(job_id)  # noqa: S311 (no secret)
    pause_s = min(first_s, most_s)
    while True:
        yield pause_s * chance.uniform(1 - _SPREAD, 1 + _SPREAD)
        pause_s = min(2 * pause_s, most_s)
