"""Watches a runtime from outside: `python -P -m muri.launcher.runtime.watchdog RUNTIME_PID TIMEOUT_S`.

A stopped process cannot notice that it is stopped, nor can one whose interpreter is frozen: C code in a member's thread
keeps the interpreter's lock, and no other thread runs any more. The runtime's heartbeat comes over the watchdog's
standard input.

The watchdog is the runtime's child: where Slurm suspends the job, the watchdog is stopped as well; therefore it only
finds a runtime that was stopped alone. It writes the cause to the runtime's log and, over its standard output, to the
runtime, which it then continues so that the runtime can end its scripts. A frozen one can end nothing and is killed.
"""

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from muri.inherited import settle_own
from muri.launcher.job.session import threads_of
from muri.launcher.runtime.hang_watch import IdleTimer, ThreadSample, sample, sampling_interval_s

logger = logging.getLogger("muri.launcher")

END_GRACE_S: Final = 30.0
"""How long the runtime may take to end its scripts after it was continued."""

_PR_SET_PDEATHSIG: Final = 1
_IGNORED: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
"""The watchdog ignores these signals: they are meant for the runtime, with which it ends."""


class Watchdog:
    """The runtime's side: starts the watchdog and learns of a hang. Without a watchdog the runtime goes on unwatched.

    Args:
        timeout_s: How long this process may be stopped or frozen; 0: do not watch.
        on_hang: Called with the cause after the watchdog has continued this process, which must then end.
    """

    def __init__(self, timeout_s: float, on_hang: Callable[[str], None]) -> None:
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the watchdog; it ends with the calling thread, which should be the main one."""
        if not self._timeout_s:
            return
        command = [sys.executable, "-P", "-m", "muri.launcher.runtime.watchdog", str(os.getpid()), str(self._timeout_s)]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            logger.warning("this process is not watched for hangs: %s", error)
            return
        threading.Thread(target=self._listen, args=(self._process,), name="watchdog", daemon=True).start()
        threading.Thread(target=self._beat, args=(self._process,), name="heartbeat", daemon=True).start()

    def close(self) -> None:
        """End the watchdog."""
        if self._process is not None:
            self._process.kill()

    def _listen(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        cause = process.stdout.readline().strip()
        if cause:
            self._on_hang(cause)

    def _beat(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None
        pause = threading.Event()
        with contextlib.suppress(OSError):  # the watchdog has ended
            while process.poll() is None:
                os.write(process.stdin.fileno(), b"x")
                pause.wait(sampling_interval_s(self._timeout_s))


class Heartbeat:
    """Counts what the runtime has sent.

    Args:
        file: The descriptor that it comes over.
    """

    def __init__(self, file: int) -> None:
        os.set_blocking(file, False)
        self._file = file
        self._count = 0

    def count(self) -> int:
        """How many beats have come so far."""
        with contextlib.suppress(BlockingIOError):
            self._count += len(os.read(self._file, 65536))
        return self._count


def main(runtime: int, timeout_s: float) -> None:
    """Watch until the runtime has ended, or has to be ended."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    interval_s = sampling_interval_s(timeout_s)
    stopped, frozen, heartbeat = IdleTimer(interval_s), IdleTimer(interval_s), Heartbeat(sys.stdin.fileno())
    while os.getppid() == runtime:
        threads = sample(threads_of(runtime))
        stopped_s = stopped.idle_s(threads, threads.stopped)
        frozen_s = frozen.idle_s(ThreadSample(), (heartbeat.count(), threads.stopped))
        if threads.stopped and stopped_s >= timeout_s:
            _end(
                runtime, f"it was stopped by a signal (SIGSTOP) and was not continued for {timeout_s:g} s", END_GRACE_S
            )
            return
        if not threads.stopped and frozen_s >= timeout_s:
            _end(runtime, f"code of a member that runs as a thread has kept the interpreter for {timeout_s:g} s", 0.0)
            return
        time.sleep(interval_s)


def _end(runtime: int, cause: str, grace_s: float) -> None:
    print(f"muri: the runtime (process {runtime}) hangs and is ended: {cause}", file=sys.stderr, flush=True)
    print(cause, flush=True)
    os.kill(runtime, signal.SIGCONT)
    end_s = time.monotonic() + grace_s
    while os.getppid() == runtime:  # while it is the parent, its number cannot belong to another process
        if time.monotonic() >= end_s:
            os.kill(runtime, signal.SIGKILL)
            return
        time.sleep(0.1)


if __name__ == "__main__":
    settle_own()
    main(int(sys.argv[1]), float(sys.argv[2]))
