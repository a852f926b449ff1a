"""What holds for all tests, however they are started."""

import signal
import threading

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Take Ctrl-C as usual: a shell starts background jobs with it ignored, and what tests start would inherit that."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
