"""Lets hooks split the batches of a process's scripts, as soon as one imports PyTorch."""

import threading
from typing import Final

from muri.launcher.accumulation.planned import hooks_wanted as wanted
from muri.launcher.isolation.import_hooks import after_import

__all__ = ["install", "wanted"]

_lock: Final = threading.Lock()
_installed: Final = threading.Event()


def install() -> None:
    """Let hooks split batches from PyTorch's import on; after those of automatic stages, and only once."""
    with _lock:
        if not _installed.is_set():
            _installed.set()
            after_import("torch", _install_hooks)


def _install_hooks() -> None:
    from muri.launcher.accumulation import hooks  # (imports torch)
    from muri.launcher.automatic.watch import guarded_installation  # (it imports the stages)

    guarded_installation("sub-batches", hooks.install)
