"""Calls that come later, unless the process has ended by then."""

import threading
from collections.abc import Callable
from typing import Any


def call_later(delay_s: float, function: Callable[..., object], *arguments: Any) -> None:
    """Call a function after some seconds, in a thread of its own that does not keep the process alive."""
    timer = threading.Timer(delay_s, function, arguments)
    timer.daemon = True
    timer.start()
