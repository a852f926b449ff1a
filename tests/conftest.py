"""What holds for all tests, however they are started."""

import signal
import threading
from typing import Final

import pytest

USUAL: Final = {
    signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL, signal.SIGUSR1: signal.SIG_DFL, signal.SIGUSR2: signal.SIG_DFL,
}  # fmt: skip
"""What Python does at a signal that its starter did not have ignored."""


def pytest_configure(config: pytest.Config) -> None:
    """Undo what the tests would inherit: background jobs start with Ctrl-C ignored, under nohup with SIGHUP, too."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in USUAL.items():
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, handler)
