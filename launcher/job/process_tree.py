"""What a process has started, as the kernel shows it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path


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
