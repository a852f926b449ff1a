"""Tells a dry run how far a loader works ahead of the loop that trains."""

from typing import Any

from muri.launcher.clock import StageClock


def tell_ahead(clock: StageClock, loader: Any, prefetched: int = 0) -> None:
    """Tell of a loader, if anybody listens.

    Args:
        clock: The script's clock.
        loader: One with workers says so as a `torch.utils.data.DataLoader` does: `num_workers`, `prefetch_factor`.
        prefetched: Batches that a thread of the script fetches ahead of it.
    """
    if clock.on_ahead is None:
        return
    workers, each = getattr(loader, "num_workers", 0), getattr(loader, "prefetch_factor", None)
    if not isinstance(workers, int):
        workers = 0
    each = each if isinstance(each, int) else 1
    clock.on_ahead(max(0, workers) * each + prefetched, max(1, workers))
