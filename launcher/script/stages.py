"""The stage API of training scripts: `muri.stage` and `muri.batches`, which can fetch one batch ahead.

Works in any Python process. Alone it only measures; inside a group each stage first waits for its resource. See
docs/scripts.md.

A loop sees its job's lease. Synergy's jobs ask for a new lease at the end of each round, and checkpoint when they get
none (section 4.3). Here it is renewed by itself until the job is asked to stop, at an iteration boundary; the usual
case needs no message.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import functools
import logging
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar

from muri.errors import UsageError
from muri.launcher.job.stage_clock import LOAD, StageClock
from muri.launcher.script.checkpoint import current_checkpointer
from muri.launcher.script.script_clock import current_clock
from muri.profiler.records import STAGES
from muri.text import nearest


class Lease(NamedTuple):
    """Whether a job may go on.

    Attributes:
        renewed: False once the job was asked to stop: it is saved and ended at the end of this training iteration.
        revocable: Whether the script has called `muri.checkpoint`. Muri stops no job without one.
    """

    renewed: bool = True
    revocable: bool = False


logger = logging.getLogger("muri.launcher")

Batch = TypeVar("Batch")

_INDEX: Final = {name: index for index, name in enumerate(STAGES)}

POLL_S: Final = 0.1
"""How often a waiting loop looks up, so that a signal can end it."""

CLOSE_TIMEOUT_S: Final = 10.0
"""How long the end of a loop waits for a fetch that is under way."""


class StageNameError(UsageError, ValueError):
    """A script named a stage that does not exist."""


class PrefetchError(UsageError, ValueError):
    """A script asked for a prefetch that does not exist."""


class stage:
    """Mark a part of the training loop: `with muri.stage("propagate"): …`.

    Inside another stage the inner one counts, and the outer one continues after it. The same
    stage inside itself is a yield point.

    Args:
        name: "load" (storage), "preprocess" (CPU), "propagate" (GPU) or "synchronize" (network).

    Raises:
        StageNameError: There is no stage of that name.
    """

    __slots__ = ("_clock", "_index")

    def __init__(self, name: str) -> None:
        index = _INDEX.get(name)
        if index is None:
            near = nearest(str(name), STAGES)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise StageNameError(f"there is no stage {name!r}; the stages are {', '.join(STAGES)}{hint}")
        self._index = index
        self._clock: StageClock | None = None

    def __enter__(self) -> None:
        """Wait for the stage's resource, if the script shares it, and begin."""
        clock = current_clock()
        if not clock.explicit:
            clock.become_explicit()
        clock.enter(self._index)
        self._clock = clock

    def __exit__(self, *_error: object) -> None:
        """End the stage and pass its resource on."""
        clock, self._clock = self._clock, None
        if clock is not None and clock is current_clock():
            clock.leave()


class batches(Generic[Batch]):
    """Iterate over a loader; fetching a batch is the `load` stage, each batch one iteration.

    An iteration ends when the next batch is asked for. `len()` is the loader's.

    Args:
        loader: Anything that can be iterated, such as a `torch.utils.data.DataLoader`.
        prefetch: With 1 a thread fetches the next batch while the loop works on this one. The batches and
            their order stay the same, unless fetching draws random numbers that the loop draws as well.

    Raises:
        PrefetchError: `prefetch` is neither 0 nor 1.
    """

    def __init__(self, loader: Iterable[Batch], *, prefetch: int = 0) -> None:
        if prefetch not in {0, 1}:
            raise PrefetchError(f"muri.batches(…, prefetch={prefetch!r}): give 0 (none) or 1 (one batch ahead)")
        self._loader = loader
        self._prefetch = bool(prefetch)
        caller = sys._getframe(1)
        self._site = (caller.f_code.co_filename, caller.f_lineno)

    @property
    def lease(self) -> Lease:
        """Whether the job may go on, as of now: see docs/checkpoints.md."""
        checkpointer = current_checkpointer()
        return Lease() if checkpointer is None else Lease(not checkpointer.stop_asked, True)

    def __len__(self) -> int:
        """Batches per epoch, if the loader knows."""
        return len(self._loader)  # type: ignore[arg-type] # raises TypeError as the loader itself would

    def __iter__(self) -> Iterator[Batch]:
        """Start an epoch."""
        clock = current_clock()
        if not clock.explicit:
            clock.become_explicit()
        clock.ask_batch()
        clock.report_prefetch_depth(self._loader, int(self._prefetch))
        checkpointer = current_checkpointer()
        with stage("load"):
            if checkpointer is None:
                source = iter(self._loader)
            else:
                source = checkpointer.position.begin(self._loader, self._site, clock.yield_point)
        prefetcher = Prefetcher(source, clock) if self._prefetch else None
        fetch = prefetcher or functools.partial(_fetch_now, source)
        try:
            while True:
                try:
                    batch = fetch()
                except StopIteration:
                    clock.drop_iteration()
                    return
                yield batch
                del batch
                clock.ask_batch()
        except GeneratorExit:  # the loop was left with `break`: its last iteration is done
            clock.end_iteration()
            raise
        finally:
            if prefetcher is not None:
                prefetcher.close()


def _fetch_now(source: Iterator[Batch]) -> Batch:
    with stage("load"):
        return next(source)


def yield_point() -> None:
    """Inside a long stage: let a member that is further behind use the resource first."""
    current_clock().yield_point()


def step() -> None:
    """End one iteration and begin the next.

    For loops whose iterations Muri cannot tell apart. From the first call on, nothing else ends an iteration.
    """
    current_clock().step()


class Prefetcher(Generic[Batch]):
    """Hands out an iterator's batches in order while a thread fetches the next one.

    The first batch is fetched in the caller's thread: that is where a shuffling sampler draws its
    seed, so that the order of batches is the same as without prefetching. The thread's fetches are a
    lane of the clock: each waits for the storage resource as the loop itself would.
    """

    def __init__(self, source: Iterator[Batch], clock: StageClock) -> None:
        self._source = source
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._wanted = threading.Semaphore(0)  # one permit for each batch that may be fetched
        # Batches, or the error in place of one, each with the seconds its fetch waited for the resource.
        self._fetched: queue.SimpleQueue[tuple[Batch | None, BaseException | None, float]] = queue.SimpleQueue()
        self._reading = threading.Lock()  # held while the loader is being read
        self._stopped = False  # set under `_reading`; then the loader is not touched any more

    def __call__(self) -> Batch:
        """Return the next batch; raise StopIteration when none is left, or the loader's own error; then no more."""
        if self._thread is None:
            batch = _fetch_now(self._source)
            torch = sys.modules.get("torch")
            modes = None if torch is None else (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
            work = functools.partial(contextvars.copy_context().run, self._work, modes)
            # A daemon, because a script that ends does not wait for batches that it did not ask for.
            self._thread = threading.Thread(target=work, name="prefetch", daemon=True)
            atexit.register(self.close)
            self._thread.start()
        else:
            batch = self._take()
        self._wanted.release()
        return batch

    def close(self) -> None:
        """End the thread; the loader is not being read when this returns, unless that takes too long."""
        if self._thread is None:
            return
        atexit.unregister(self.close)
        end_s = time.monotonic() + CLOSE_TIMEOUT_S
        while not (free := self._reading.acquire(timeout=POLL_S)) and time.monotonic() < end_s:
            pass
        if not free:
            logger.warning("a batch is still being fetched %g s after its loop ended", CLOSE_TIMEOUT_S)
        self._stopped = True
        if free:
            self._reading.release()
        self._wanted.release()

    def _take(self) -> Batch:
        begin_s = self._clock.now()
        while True:
            with contextlib.suppress(queue.Empty):
                batch, error, lane_wait_s = self._fetched.get(timeout=POLL_S)
                break
        # While the fetch itself waited for another member, the loop waited for that member, not for its own fetch.
        self._clock.add_wait(LOAD, min(lane_wait_s, self._clock.now() - begin_s))
        if error is not None:
            raise error
        return batch  # type: ignore[return-value] # a batch may be None

    def _work(self, modes: tuple[bool, bool] | None) -> None:
        """The thread: one batch for each permit, until the first error, in the PyTorch modes of the caller's."""
        with contextlib.ExitStack() as stack:
            if modes is not None:
                torch, (gradients, inference) = sys.modules["torch"], modes
                stack.enter_context(torch.inference_mode(inference))
                stack.enter_context(torch.set_grad_enabled(gradients))
            stack.enter_context(self._clock.lane())
            while self._wanted.acquire() and not self._stopped and self._fetch():
                pass

    def _fetch(self) -> bool:
        """Fetch one batch, or the error to be raised in the loop in its place; False after an error."""
        begin_s, wait_s = self._clock.now(), 0.0
        try:
            self._clock.enter(LOAD)
            wait_s = self._clock.now() - begin_s
            try:
                with self._reading:
                    if self._stopped:
                        return False
                    self._fetched.put((next(self._source), None, wait_s))
            finally:
                self._clock.leave()
        except BaseException as error:
            self._fetched.put((None, error, wait_s))
            return False
        return True
