"""Events: the watches for arrivals and ends of jobs, and when a cycle on one is due: soon, but bounded."""

import logging
import math
import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import MuriError
from muri.files import share_with
from muri.slurm_plugin.controller.status import STATUS_NAME, StatusError, read_status
from muri.slurm_plugin.gateway.accounting import slurm_settings
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.private_files import UnsafeFileError, why_unsafe
from muri.slurm_plugin.records.cluster import JobState

GATHER_S: Final = 1.0
"""Events of this time share a cycle: `sbatch` in a loop submits several jobs a second."""

LEAST_GAP_S: Final = 5.0
"""Least time between the end of a cycle and one on an event, in which slurmctld serves others."""

MOST_SHARE: Final = 0.2
"""Most share of the time that cycles on events take; after a long one the gap grows."""

LOOK_S: Final = 1.0
"""Time between two looks of a watch."""

log = logging.getLogger("muri.controller")


class Watch(Protocol):
    """Something that notices events."""

    def look(self) -> bool:
        """Return whether there was an event since the last look or mark."""
        ...

    def mark(self) -> bool:
        """Note that a cycle begins; return whether there was an event just now that it may not see yet."""
        ...


class Bell:
    """Says when the next cycle on an event is due.

    Events of `GATHER_S` seconds share a cycle. After a cycle there is a pause of `LEAST_GAP_S` seconds, or longer, so
    that cycles have no more than `MOST_SHARE` of the time, however many jobs a user submits.
    """

    def __init__(self, watches: Sequence[Watch], clock: Clock = MACHINE_CLOCK) -> None:
        self._watches = watches
        self._clock = clock
        self._first_s = math.inf
        self._last_s = -math.inf
        self._free_s = -math.inf

    @property
    def due_s(self) -> float:
        """When the next cycle on an event is due, by the clock; infinite without an event."""
        return max(self._first_s + GATHER_S, self._free_s)

    def ring(self) -> None:
        """Take note of an event."""
        self._last_s = self._clock()
        self._first_s = min(self._first_s, self._last_s)

    def look(self) -> None:
        """Look at all watches."""
        has_rung = [watch.look() for watch in self._watches]  # all of them
        if any(has_rung):
            self.ring()

    @contextmanager
    def cycle(self) -> Iterator[None]:
        """Surround a cycle. It serves all events but the newest, whose jobs may not be in the queue yet."""
        has_rung = [watch.mark() for watch in self._watches]
        if any(has_rung):
            self.ring()
        begun_s = self._clock()
        is_new = self._last_s > begun_s - GATHER_S
        self._first_s = self._last_s if is_new else math.inf
        try:
            yield
        finally:
            ended_s = self._clock()
            rest_s = (ended_s - begun_s) * (1 / MOST_SHARE - 1)
            self._free_s = ended_s + max(LEAST_GAP_S, rest_s)

    def give_up(self) -> None:
        """Note that no cycle could be run; the timer's serves all events so far."""
        self._first_s = math.inf
        self._free_s = self._clock() + LEAST_GAP_S


_ENDS_POLL_S: Final = 5.0
"""How often slurmctld is asked, while jobs wait, whether any have ended; its answer's length does not depend on the
queue's."""

_TRY_AGAIN_S: Final = 60.0
"""Time until another try to make the notice file."""

_ENDS: Final = ("REQUEST_COMPLETE_BATCH_SCRIPT", "REQUEST_COMPLETE_JOB_ALLOCATION", "MESSAGE_EPILOG_COMPLETE")
"""Messages to slurmctld when a job ends. The last comes from each node that had something to clean up."""

_COUNTS: Final = re.compile(rf"^\s*(?:{'|'.join(_ENDS)})\b.*?\bcount:(\d+)", re.MULTILINE)
_CALLS: Final = "Remote Procedure Call statistics by message type"


def open_bell(notice_file: Path, state_dir: Path) -> Bell:
    """Return a bell that this machine's slurmctld rings."""
    commands = SlurmCommands()
    ends = EndWatch(state_dir / STATUS_NAME, commands)
    return Bell((ArrivalWatch(notice_file, commands), ends))


class ArrivalWatch:
    """Notices that job_submit has written to the notice file: a job has come, or a member's model has been measured.

    The file's content is never read.
    """

    def __init__(self, path: Path, commands: SlurmCommands, clock: Clock = MACHINE_CLOCK) -> None:
        self._path = path
        self._commands = commands
        self._clock = clock
        self._try_s = clock()
        self._seen_ns = self._written_ns()

    def look(self) -> bool:
        """Return whether notice was given since the last look; a file that is missing is made."""
        before_ns, self._seen_ns = self._seen_ns, self._written_ns()
        if self._seen_ns is None and self._clock() >= self._try_s:
            self._try_s = self._clock() + _TRY_AGAIN_S
            try:
                make_notice_file(self._path, slurm_user(slurm_settings(self._commands)))
                self._seen_ns = self._written_ns()
            except (MuriError, OSError) as error:
                log.warning("slurmctld cannot give notice of jobs, which wait for the timer: %s", error)
        return before_ns is not None and self._seen_ns not in {None, before_ns}

    def mark(self) -> bool:
        """As `look`: a notice comes a moment before its job is in the queue."""
        return self.look()

    def _written_ns(self) -> int | None:
        try:
            facts = self._path.lstat()
        except OSError:
            return None
        return facts.st_mtime_ns if stat.S_ISREG(facts.st_mode) else None


def make_notice_file(path: Path, uid: int) -> None:
    """Make the file to which job_submit alone writes, as SlurmUser, in a directory where only root makes files.

    It holds one byte, which is overwritten: so it never grows, and needs no room on a full disk.

    Raises:
        UnsafeFileError: Other users could make files beside it.
        OSError: It cannot be made.
    """
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    reason = why_unsafe(path.parent)
    if reason is not None:
        raise UnsafeFileError(f"{path.parent} is not a place for the notice file: {reason}")
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(handle, b"0")
        share_with(handle, uid, 0o6)
    finally:
        os.close(handle)


def slurm_user(settings: Mapping[str, str]) -> int:
    """Return the uid that slurmctld runs as; a MuriError where the settings do not say."""
    value = settings.get("SlurmUser", "")
    uid = re.search(r"\((\d+)\)", value)
    if uid is None:
        raise MuriError(f"Slurm names no SlurmUser ({value!r})")
    return int(uid[1])


def slurmctld_hosts(settings: Mapping[str, str]) -> tuple[str, ...]:
    """Return the short names of the hosts that slurmctld may run on."""
    hosts = [value for key, value in settings.items() if key.startswith("SlurmctldHost")]
    return tuple(re.split(r"[.(]", host, maxsplit=1)[0] for host in hosts)


def this_host() -> str:
    """Return this host's short name."""
    return socket.gethostname().partition(".")[0]


class EndWatch:
    """Notices in slurmctld's statistics that jobs of any user have ended; asks only while Muri's jobs wait.

    It counts messages: that a batch script or an allocation has ended, and that a node has cleaned up after a job. The
    last one comes when GPUs are free. A node that fails sends none. `status` is the file of the last cycle, this
    process's or another's, by which jobs wait.
    """

    def __init__(self, status: Path, commands: SlurmCommands, clock: Clock = MACHINE_CLOCK) -> None:
        self._status = status
        self._written_ns = -1
        self._jobs_wait = False
        self._commands = commands
        self._clock = clock
        self._next_s = -1.0
        self._ended: int | None = None

    def look(self) -> bool:
        """Return whether jobs have ended since the last cycle began."""
        if self._clock() < self._next_s or not self._someone_waits():
            return False
        before = self._ended
        self._count()
        return before is not None and self._ended not in {None, before}

    def mark(self) -> bool:
        """Count anew; the cycle sees what has ended so far."""
        self._count()
        return False

    def _someone_waits(self) -> bool:
        """Whether jobs waited after the last cycle; False where there is no readable file."""
        try:
            written_ns = self._status.stat().st_mtime_ns
            if written_ns != self._written_ns:
                jobs = read_status(self._status).jobs
                self._jobs_wait = any(job.slurm_state == JobState.PENDING.value for job in jobs)
                self._written_ns = written_ns
        except (OSError, StatusError):
            return False
        return self._jobs_wait

    def _count(self) -> None:
        """Read the count; without an answer, Slurm is asked again later."""
        self._next_s = self._clock() + _ENDS_POLL_S
        try:
            self._ended = ended_in(self._commands.run("count ended jobs", ["sdiag"]))
        except MuriError as error:
            log.debug("events are not seen: %s", error)


def ended_in(text: str) -> int | None:
    """Return a number that grows with each job that ends, until slurmctld restarts; None where sdiag lacks it."""
    return sum(map(int, _COUNTS.findall(text))) if _CALLS in text else None
