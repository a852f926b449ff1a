"""What holds for all tests, however they are started."""

import signal
import threading
from collections.abc import Iterator
from typing import Final

import pytest

USUAL: Final = {
    signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL, signal.SIGUSR1: signal.SIG_DFL, signal.SIGUSR2: signal.SIG_DFL,
}  # fmt: skip
"""What Python does at a signal that its starter did not have ignored."""


@pytest.fixture(autouse=True, scope="session")
def status_dir_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the cycles of tests from telling this machine's users about jobs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MURI_STATUS_DIR", str(tmp_path_factory.mktemp("status")))
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Undo what the tests would inherit: background jobs start with Ctrl-C ignored, under nohup with SIGHUP, too."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in USUAL.items():
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, handler)
