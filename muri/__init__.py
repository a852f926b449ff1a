"""Muri interleaves training jobs that wait for different resources on the same GPUs.

A training script needs two names from here; three more let it be stopped and resumed, read less, and
need less memory::

    import muri

    for batch in muri.batches(loader):          # storage
        with muri.stage("preprocess"):          # CPU
            ...

    muri.checkpoint(save, load)                 # before the loop: docs/checkpoints.md
    muri.cache(dataset, gib=8)                  # keeps part of a dataset in memory: docs/scripts.md

Everything else is reached through the commands `muri` and `muri-controller`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muri.launcher.script.accumulate import accumulate as accumulate
    from muri.launcher.script.checkpoint import Resumed as Resumed
    from muri.launcher.script.checkpoint import checkpoint as checkpoint
    from muri.launcher.script.checkpoint import should_stop as should_stop
    from muri.launcher.script.dataset_cache import cache as cache
    from muri.launcher.script.stages import batches as batches
    from muri.launcher.script.stages import stage as stage
    from muri.launcher.script.stages import step as step
    from muri.launcher.script.stages import yield_point as yield_point

__version__ = "0.3.0"

_NAMES = {
    "accumulate": ("accumulate",),
    "checkpoint": ("Resumed", "checkpoint", "should_stop"),
    "dataset_cache": ("cache",),
    "stages": ("batches", "stage", "step", "yield_point"),
}
_LAZY = {name: f"muri.launcher.script.{module}" for module, names in _NAMES.items() for name in names}
__all__ = [
    "Resumed", "__version__", "accumulate", "batches", "cache", "checkpoint", "should_stop", "stage", "step",
    "yield_point",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the stage API on first use, so that `import muri` itself costs nothing."""
    if name not in _LAZY:
        raise AttributeError(f"module 'muri' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
