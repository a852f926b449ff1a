"""What a job that ran out of GPU memory beside others asks for next time."""

from typing import Final

from muri.errors import UsageError

RAISED_BY: Final = 1.5
"""How many times as much memory a job asks for after an out-of-memory error, on Slurm as in the simulator.

The paper leaves the amount open; this is Muri's choice: one raise mends a prediction of two thirds of the truth, and
without any a job could fail beside the same neighbours for ever.
"""

MAX_RAISES: Final = 3
"""After so many out-of-memory errors the next one is the job's own failure; the last raise asks for a whole GPU."""

RAISING_POLICIES: Final = frozenset({"horus", "horus-f", "obp", "pab"})
"""Policies that give a job another try after an out-of-memory error; their plans rest on predicted memory."""


def raised_gib(asked_gib: float, raises: int, capacity_gib: float) -> float | None:
    """The memory per GPU to ask for after an out-of-memory error; None where asking for more is no use.

    A prediction that fell short by up to a third is mended by the first raise; the last one asks for all memory, so
    the job then has its GPUs to itself: whatever happens after that is not for want of room.

    Args:
        asked_gib: What it was given room for when it failed.
        raises: How often it was raised before.
        capacity_gib: Memory of a GPU; 0 when unknown.

    Raises:
        UsageError: A figure is negative.
    """
    if min(asked_gib, raises, capacity_gib) < 0:
        raise UsageError(f"memory {asked_gib} GiB of {capacity_gib} GiB, raised {raises} times: none can be negative")
    if raises >= MAX_RAISES or (capacity_gib and asked_gib >= capacity_gib):
        return None
    if not capacity_gib:
        return asked_gib * RAISED_BY or None
    if raises == MAX_RAISES - 1 or not asked_gib:
        return capacity_gib
    return min(capacity_gib, asked_gib * RAISED_BY)
