"""What holds for all tests, however they are started."""

import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from hypothesis.internal.conjecture import providers

# Hypothesis also tries the numbers and texts that stand in the product's modules, but only of those that happen to be
# loaded: which other tests ran before in the same process would decide a test's inputs.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants

USUAL: Final = {
    signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL, signal.SIGUSR1: signal.SIG_DFL, signal.SIGUSR2: signal.SIG_DFL,
}  # fmt: skip
"""What Python does at a signal that its starter did not have ignored."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="run the tests in an order drawn with this seed")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """No test may rest on what another one leaves behind."""
    if seed := config.getoption("--shuffle"):
        random.Random(seed).shuffle(items)


def pytest_configure(config: pytest.Config) -> None:
    """Undo what the tests would inherit: background jobs start with Ctrl-C ignored, under nohup with SIGHUP, too."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in USUAL.items():
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _no_thread_of_a_virtual_clock_is_left() -> Iterator[None]:
    """A thread that waits for virtual time after its test would fail minutes later, in the middle of other tests."""
    yield
    if (virtual_clock := sys.modules.get("virtual_clock")) is not None:
        left = virtual_clock.end_threads()
        assert not left, f"{left} still wait: the test's own thread has to let time go on until they have ended"


@pytest.fixture
def configured(request: pytest.FixtureRequest) -> Callable[..., dict[str, Any]]:
    """Give the keys of muri.yaml that a test's controllers have; all others are as shipped.

    The marks `configuration` name them, a module's and then a test's own, and at last the arguments. Of a section,
    such as `profiling`, a later mark changes only the keys that it names. `tuning` is not a section of
    the file: it holds the controller's constants.
    """
    marks = [mark.kwargs for mark in request.node.iter_markers("configuration")]

    def keys(**changes: Any) -> dict[str, Any]:
        config: dict[str, Any] = {}
        for named in (*reversed(marks), changes):
            both = {key: {**config[key], **named[key]} for key in named if isinstance(config.get(key), dict)}
            config |= {**named, **both}
        return config

    return keys
