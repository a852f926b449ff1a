"""What a process has started, as the kernel shows it; stops and continues all of it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

MURIS_OWN: Final = "muri-looks"
"""The kernel's name for a thread of Muri's own in a script's process: what it does is not a work of the script."""


def name_as_muris_own() -> None:
    """Give the calling thread that name; only the kernel's can be read from outside of the process."""
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(MURIS_OWN)


def threads_of(pid: int) -> list[Path]:
    """All threads of a process; none if it has ended."""
    with contextlib.suppress(OSError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []


def children_of(threads: Iterable[Path]) -> Iterator[int]:
    """The processes that these threads have started and that still exist."""
    for thread in threads:
        with contextlib.suppress(OSError):
            yield from map(int, (thread / "children").read_text().split())


def descendants_of(root: int) -> Iterator[int]:
    """All processes that descend from one; parents come before their children."""
    waiting = [root]
    while waiting:
        children = list(children_of(threads_of(waiting.pop(0))))
        yield from children
        waiting.extend(children)


def threads_of_trees(pids: Iterable[int]) -> Iterator[Path]:
    """All threads of these processes and of their descendants."""
    waiting = list(pids)
    while waiting:
        threads = threads_of(waiting.pop())
        yield from threads
        waiting.extend(children_of(threads))


MOST_ROUNDS: Final = 10
"""A process may start others before its own turn to be stopped comes; those are found in the next round."""


def stop_descendants(root: int) -> None:
    """Stop all processes that descend from one, but not that one itself. 0 is not a process."""
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
