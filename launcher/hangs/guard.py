"""The runtime's side of its watchdog."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable

logger = logging.getLogger("muri.launcher")


class Guard:
    """Has this process watched from outside; without a watchdog it goes on unwatched.

    Args:
        timeout_s: How long this process may be stopped.
        on_hang: Called with the cause, once this process was continued in order to end.
    """

    def __init__(self, timeout_s: float, on_hang: Callable[[str], None]) -> None:
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the watchdog; it ends with the calling thread, which should be the main one."""
        if not self._timeout_s:
            return
        command = [sys.executable, "-P", "-m", "muri.launcher.hangs.watchdog", str(os.getpid()), str(self._timeout_s)]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            logger.warning("nobody watches whether this process hangs: %s", error)
            return
        threading.Thread(target=self._listen, args=(self._process,), name="watchdog", daemon=True).start()

    def close(self) -> None:
        """End the watchdog."""
        if self._process is not None:
            self._process.kill()

    def _listen(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        cause = process.stdout.readline().strip()
        if cause:
            self._on_hang(cause)
