"""Stops and continues all that a member's own process has started, without asking its supervisor."""

import contextlib
import os
import signal
from typing import Final

from muri.launcher.job.process_tree import descendants_of

MOST_ROUNDS: Final = 10
"""A process may start others before its own turn to be stopped comes; those are found in the next round."""


def stop_descendants(root: int) -> None:
    """Stop all processes that descend from one, but not that one itself. 0 is no process."""
    stopped: set[int] = set()
    for _ in range(MOST_ROUNDS):
        new = [pid for pid in _descendants(root) if pid not in stopped]
        if not new:
            return
        _send(signal.SIGSTOP, new)
        stopped.update(new)


def continue_descendants(root: int) -> None:
    """Continue all processes that descend from one."""
    _send(signal.SIGCONT, _descendants(root))


def _descendants(root: int) -> list[int]:
    """Parents come before their children."""
    return list(descendants_of(root)) if root else []


def _send(number: int, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
