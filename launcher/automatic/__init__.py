"""Hooks in PyTorch for scripts that don't call Muri, installed when the script imports PyTorch.

`watch` tells which clock a thread's hooks feed, and tells iterations apart; `data_loading` sees the DataLoader and its
workers, `compute` forward, backward and optimizer steps, `network` collectives and DDP; `compiling` keeps hooks away
from `torch.compile`. Nothing here imports torch before the script does. See docs/scripts.md.
"""

from __future__ import annotations

from types import ModuleType

from muri.launcher.job.import_hooks import after_import


def install_stage_hooks() -> None:
    """Mark the stages of scripts from PyTorch's import on; call once per process."""
    after_import("torch", _install_stage_hooks)


def _install_stage_hooks(_torch: ModuleType) -> None:
    from muri.launcher.automatic import compiling, compute, data_loading, network
    from muri.launcher.automatic.watch import guarded_installation

    guarded_installation("compute", compute.install)
    guarded_installation("workers", data_loading.install_workers)
    guarded_installation("fetching", data_loading.install_fetching)
    guarded_installation("collectives", network.install_collectives)
    guarded_installation("data_parallel", network.install_data_parallel)
    guarded_installation("torch.compile", compiling.install)
