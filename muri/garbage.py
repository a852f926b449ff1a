"""The cyclic garbage collector, where it only costs time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector, if it was on.

    Reading and planning a queue makes a million small records that all stay, and none of them in a reference cycle. The
    collector would look at all of them again and again: a fifth of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
