"""Fetching one batch ahead, in a thread of the script, while the loop computes: `muri.batches(loader, prefetch=1)`."""

import atexit
import contextlib
import contextvars
import logging
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

from muri.launcher.clock import StageClock
from muri.profiler.records import STAGES

Batch = TypeVar("Batch")

logger = logging.getLogger("muri.launcher")

POLL_S: Final = 0.1
"""How often a waiting loop looks up, so that a signal can end it."""

CLOSE_PATIENCE_S: Final = 10.0
"""How long the end of a loop waits for a fetch that is under way."""

_LOAD: Final = STAGES.index("load")


class _Line(Generic[Batch]):
    """What passes between the loop and the thread; keeps neither of them alive.

    Attributes:
        wanted: One permit for each batch that may be fetched.
        fetched: Batches, or the error that came in place of one, each with the seconds its fetch
            waited for the resource.
        reading: Held while the loader is being read.
        stopped: Set under `reading`, after which the loader is not touched any more.
    """

    def __init__(self) -> None:
        self.wanted = threading.Semaphore(0)
        self.fetched: queue.SimpleQueue[tuple[Batch | None, BaseException | None, float]] = queue.SimpleQueue()
        self.reading = threading.Lock()
        self.stopped = False

    def stop(self) -> None:
        """End the thread, as soon as it has read what it is reading."""
        end_s = time.monotonic() + CLOSE_PATIENCE_S
        while not (free := self.reading.acquire(timeout=POLL_S)) and time.monotonic() < end_s:
            pass
        if not free:
            logger.warning("a batch is still being fetched %g s after its loop ended", CLOSE_PATIENCE_S)
        self.stopped = True
        if free:
            self.reading.release()
        self.wanted.release()


class Prefetcher(Generic[Batch]):
    """Hands out an iterator's batches in order, with the next one being fetched meanwhile.

    The first batch is fetched in the caller's thread: that is where a shuffling sampler draws its
    seed, so that the order of batches is the same as without prefetching. The thread's fetches are a
    lane of the clock: each waits for the storage resource as the loop itself would.

    Args:
        source: The loader's iterator.
        clock: The script's clock.
    """

    def __init__(self, source: Iterator[Batch], clock: StageClock) -> None:
        self._source = source
        self._clock = clock
        self._line: _Line[Batch] = _Line()
        self._thread: threading.Thread | None = None
        self._end: BaseException | None = None

    def __call__(self) -> Batch:
        """The next batch.

        Raises:
            StopIteration: There is none left.
            BaseException: What the loader raised.
        """
        if self._end is not None:
            raise StopIteration
        batch = self._fetch_here() if self._thread is None else self._take()
        self._line.wanted.release()
        return batch

    def close(self) -> None:
        """End the thread; the loader is not being read when this returns."""
        if self._thread is not None:
            self._line.stop()
            atexit.unregister(self._stop_at_exit)

    def _fetch_here(self) -> Batch:
        self._clock.enter(_LOAD)
        try:
            batch = next(self._source)
        finally:
            self._clock.leave()
        self._start()
        return batch

    def _start(self) -> None:
        context = contextvars.copy_context()
        arguments = (self._source, self._clock, self._line, _torch_modes())
        # A daemon, because a script that ends does not wait for batches that nobody asked for.
        self._thread = threading.Thread(target=context.run, args=(_work, *arguments), name="prefetch", daemon=True)
        self._stop_at_exit = self._line.stop
        weakref.finalize(self, self._line.stop).atexit = False
        atexit.register(self._stop_at_exit)
        self._thread.start()

    def _take(self) -> Batch:
        begin_s = time.perf_counter()
        while True:
            try:
                batch, error, lane_wait_s = self._line.fetched.get(timeout=POLL_S)
                break
            except queue.Empty:
                continue
        # The loop waited for another member, not for its own fetch, as far as the fetch did.
        self._clock.add_wait(_LOAD, min(lane_wait_s, time.perf_counter() - begin_s))
        if error is not None:
            self._end = error
            raise error
        return batch  # type: ignore[return-value] # a batch may be None


def _work(
    source: Iterator[Batch], clock: StageClock, line: _Line[Batch], modes: Callable[[], contextlib.ExitStack]
) -> None:
    """The thread: one batch for each permit, until the first error."""
    with modes(), clock.lane():
        while True:
            line.wanted.acquire()
            if line.stopped:
                return
            if not _fetch(source, clock, line):
                return


def _fetch(source: Iterator[Batch], clock: StageClock, line: _Line[Batch]) -> bool:
    """Fetch one batch, or the error to be raised in the loop in its place; False after an error."""
    begin_s = time.perf_counter()
    wait_s = 0.0
    try:
        clock.enter(_LOAD)
        wait_s = time.perf_counter() - begin_s
        try:
            with line.reading:
                if line.stopped:
                    return False
                line.fetched.put((next(source), None, wait_s))
        finally:
            clock.leave()
    except BaseException as error:
        line.fetched.put((None, error, wait_s))
        return False
    return True


def _torch_modes() -> Callable[[], contextlib.ExitStack]:
    """What puts a thread into PyTorch's per-thread modes of the calling one, until the stack is closed."""
    torch = sys.modules.get("torch")
    if torch is None:
        return contextlib.ExitStack
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def enter() -> contextlib.ExitStack:
        modes = contextlib.ExitStack()
        modes.enter_context(torch.inference_mode(inference))
        modes.enter_context(torch.set_grad_enabled(gradients))
        return modes

    return enter
