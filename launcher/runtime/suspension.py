"""Pauses members whose jobs are suspended: `scontrol suspend` stops only the processes of the member's own job.

The member's `muri run` is one of them, and the runtime knows its process from the socket. How Slurm stops it depends on
ProctrackType: by SIGSTOP, or by the freezer of its control group. The kernel shows both.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from muri.launcher.arbitration.arbiter import PausingArbiter
from muri.launcher.job.session import MemberSession
from muri.launcher.runtime.hang_watch import is_stopped

logger = logging.getLogger("muri.launcher")

INTERVAL_S: Final = 1.0

_CONTROL_GROUPS: Final = Path("/sys/fs/cgroup")


class SuspensionWatch:
    """Looks at the members' own processes every second.

    Args:
        running: The sessions under way.
        arbiter: Grants a paused member nothing.
        is_suspended: Whether a process is suspended.
    """

    def __init__(
        self,
        running: Callable[[], list[MemberSession]],
        arbiter: PausingArbiter,
        is_suspended: Callable[[int], bool] | None = None,
    ) -> None:
        self._running = running
        self._arbiter = arbiter
        self._is_suspended = is_suspended or suspended
        self._closed = threading.Event()
        self._lock = threading.Lock()  # held while members are paused and resumed

    def start(self) -> None:
        """Watch in the background."""
        threading.Thread(target=self._watch, name="suspension", daemon=True).start()

    def close(self) -> None:
        """Resume all members for good: the runtime ends, and their scripts have to act on that."""
        self._closed.set()
        self.check()

    def check(self) -> None:
        """Pause and resume members as their processes are."""
        with self._lock:
            for session in self._running():
                pid = session.client_pid
                if pid and not self._closed.is_set() and not session.ended.is_set() and self._is_suspended(pid):
                    self._pause(session)
                else:
                    self._resume(session)

    def _watch(self) -> None:
        while not self._closed.wait(INTERVAL_S):
            try:
                self.check()
            except Exception:  # a failing watch must end neither the members nor itself
                logger.exception("looking for members whose jobs are suspended failed")

    def _pause(self, session: MemberSession) -> None:
        if self._arbiter.pauses_everywhere:
            session.stop()  # each time: it may have had no process yet
        self._arbiter.pause(session.member)
        if not session.paused:
            session.paused = True
            logger.info("member %s is paused: its job is suspended", session.member)

    def _resume(self, session: MemberSession) -> None:
        if session.paused:
            session.clock.note_pause()
            self._arbiter.resume(session.member)
            session.go_on()
            session.paused = False
            logger.info("member %s goes on", session.member)


def suspended(pid: int) -> bool:
    """Whether a process is stopped by a signal, or frozen with its control group."""
    return is_stopped(pid) or frozen(pid)


def frozen(pid: int, groups: Path = _CONTROL_GROUPS, processes: Path = Path("/proc")) -> bool:
    """Whether the freezer has stopped a process; False where that cannot be seen.

    Args:
        pid: The process.
        groups: Where the control groups are mounted.
        processes: Where the kernel shows processes.
    """
    with contextlib.suppress(OSError):
        for line in (processes / str(pid) / "cgroup").read_text().splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if not controllers:  # version 2 of control groups
                place, mark = groups / path.lstrip("/") / "cgroup.events", "frozen 1"
            elif "freezer" in controllers.split(","):
                place, mark = groups / "freezer" / path.lstrip("/") / "freezer.state", "FROZEN"
            else:
                continue
            with contextlib.suppress(OSError):
                if mark in place.read_text().splitlines():
                    return True
    return False
