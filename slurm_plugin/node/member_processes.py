"""The processes of a pilot job's members on this node, whether they ever attach to the runtime or not.

They carry their job's number, and, set by the SPANK plugin where it opens the pilot's GPUs, $MURI_PILOT: so those of
jobs that have joined later are found, too. Their children inherit both.
"""

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from muri.profiler.usage import Throttle

_SCAN_S: Final = 2.0
_PILOT: Final = b"MURI_PILOT"
_JOB: Final = b"SLURM_JOB_ID"
_STDERR: Final = 2


class MemberProcesses:
    """Finds them in /proc, `members` also without the variable; one thread looks, another may read `found`."""

    def __init__(self, pilot: int, members: Collection[str] = ()) -> None:
        # By job id, its outermost processes: the last search found them
        self.found: Mapping[str, frozenset[int]] = {}
        self._pilot = str(pilot).encode()
        self._members = frozenset(members)
        self._due = Throttle(_SCAN_S)

    def look(self) -> frozenset[str]:
        """Return the jobs that have a process now. New ones are searched for rarely; an end is seen at once."""
        if self._due.due():
            self.found = self.search()
            self._due.done()
        return frozenset(job for job, pids in self.found.items() if any(Path(f"/proc/{pid}").exists() for pid in pids))

    def search(self) -> dict[str, frozenset[int]]:
        """Return what is `found` now."""
        jobs, own = dict[int, str](), os.geteuid()
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and entry.stat(follow_symlinks=False).st_uid == own:
                    variables = Path(entry.path, "environ").read_bytes().split(b"\0")
                    words = dict(variable.partition(b"=")[::2] for variable in variables)
                    job = words.get(_JOB, b"").decode(errors="replace")
                    if job in self._members or (job.isdecimal() and words.get(_PILOT) == self._pilot):
                        jobs[int(entry.name)] = job
        found: dict[str, set[int]] = {}
        for pid, job in jobs.items():
            if jobs.get(_parent(pid)) != job:
                found.setdefault(job, set()).add(pid)
        return {job: frozenset(pids) for job, pids in found.items()}


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])  # names are any bytes
    return 0


def standard_error(pids: Iterable[int]) -> int | None:
    """Open the standard error of one of these processes; return None if none of them has one that can be opened."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or closed it; or it is a socket
            return os.open(f"/proc/{pid}/fd/{_STDERR}", flags)
    return None
