"""Which threads and processes work for a member."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from muri.launcher.hangs.evidence import children_of, has_in_environment, threads_of, trees


@dataclass(frozen=True, slots=True)
class Roots:
    """Where a member's threads and processes begin.

    Attributes:
        threads: Kernel's numbers of its threads in this process.
        process: The script's own process, 0 if it has none.
        supervisor: The process that stands between that one and this, 0 if there is none.
    """

    threads: tuple[int, ...] = ()
    process: int = 0
    supervisor: int = 0


def own_threads(numbers: Iterable[int]) -> list[Path]:
    """Threads of this process."""
    return [Path(f"/proc/{os.getpid()}/task/{number}") for number in numbers]


def family_of(member: str, roots: Roots, others: Sequence[Roots]) -> list[Path]:
    """All threads that work for a member, those of its subprocesses included.

    A worker that was forked by a thread which has ended belongs to nobody any more: it counts for every member.

    Args:
        member: Its job id, which its subprocesses have in their environment.
        roots: Where to begin.
        others: The roots of the other members.
    """
    if roots.supervisor:
        return list(trees([roots.supervisor]))
    own = own_threads(roots.threads)
    theirs = {child for other in others for child in children_of(own_threads(other.threads))}
    mine = set(children_of(own))
    for child in set(children_of(threads_of(os.getpid()))) - theirs - mine:
        if has_in_environment(child, "SLURM_JOB_ID", member) or _is_fork(child):
            mine.add(child)
    return [*own, *trees(mine)]


def _is_fork(pid: int) -> bool:
    """Whether a process is a fork of this one that runs no other program."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == Path("/proc/self/cmdline").read_bytes()
    except OSError:
        return False
