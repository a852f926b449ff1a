"""Stages of scripts that mark none: hooks in PyTorch, put there when the script imports it.

`watch` says which clock a thread's hooks feed and tells iterations apart, `fetching` and `workers` see
the DataLoader, `compute` forward, backward and optimizer steps, `collectives` and `data_parallel` the
network. Nothing here imports torch before the script does. See docs/automatic-stages.md.
"""

from muri.launcher.isolation.import_hooks import after_import
from muri.launcher.automatic.watch import AUTOMATIC_VARIABLE, guarded_installation, wanted

__all__ = ["AUTOMATIC_VARIABLE", "install", "wanted"]


def install() -> None:
    """Put the hooks into PyTorch as soon as it is imported; call once in a process."""
    after_import("torch", _install_hooks)


def _install_hooks() -> None:
    from muri.launcher.automatic import collectives, compute, data_parallel, fetching, workers

    for module in (compute, workers, fetching, collectives, data_parallel):
        guarded_installation(module.__name__.rpartition(".")[2], module.install)
