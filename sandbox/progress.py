"""Progress lines with elapsed seconds on stderr, so that a long first build never looks stuck."""

import sys
import time


class Progress:
    """Prints one line per step, and at most one line per `quiet_s` inside a step."""

    def __init__(self, quiet_s: float = 5.0) -> None:
        self._started = time.monotonic()
        self._last_line = float("-inf")
        self._quiet_s = quiet_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since this progress began."""
        return time.monotonic() - self._started

    def step(self, text: str) -> None:
        """Print a line now."""
        self._last_line = time.monotonic()
        print(f"[{self.elapsed_s:5.1f} s] {text}", file=sys.stderr, flush=True)

    def detail(self, text: str) -> None:
        """Print a line unless another one was printed a moment ago."""
        if time.monotonic() - self._last_line >= self._quiet_s:
            self.step(text)
