"""Waiting in real time, for tests that start real processes; whatever waits by a clock is tested with a virtual one."""

import os
import time
from collections.abc import Callable
from typing import Final

DEADLINE_S: Final = float(os.environ.get("MURI_DEADLINE_S", "240"))
"""Enough on a slow machine for anything that ends by itself; less where a test is to fail (scripts/mutation-check)."""


def until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll until the condition holds; fail at the deadline."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"waited {deadline_s} s in vain for {what}"
        time.sleep(0.02)
