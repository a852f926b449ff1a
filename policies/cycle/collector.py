"""Python's garbage collector, kept out of the way of a long queue."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector, if it was on.

    A plan for a hundred thousand jobs makes a million small records that all stay, and none of them in a
    cycle. The collector would look at all of them again and again: a fifth of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
