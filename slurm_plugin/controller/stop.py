"""A signal's word that it is time to stop."""

import os
import select
import signal


class StopSignal:
    """Whether this process was told to stop by SIGTERM or SIGINT.

    It takes no lock: the handler may interrupt `wait` anywhere, and would wait for ever for one that `wait` holds, as
    threading.Event's.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._woken, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)

    def heed_signals(self) -> None:
        """Let both signals set it from now on, instead of ending the process."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.set())

    def set(self) -> None:
        """Tell it."""
        if not self._is_set:
            self._is_set = True
            os.write(self._wakes, b"!")

    def is_set(self) -> bool:
        """Whether to stop now."""
        return self._is_set

    def wait(self, timeout: float) -> bool:
        """Sleep until told to stop, at most `timeout` seconds."""
        select.select([self._woken], [], [], timeout)
        return self._is_set
