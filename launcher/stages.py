"""The stage API of training scripts: `muri.stage` and `muri.batches`.

Works in any Python process. Alone it only measures; inside a group each stage first waits for
its resource. See docs/stage-api.md.
"""

import difflib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Final, Generic, TypeVar

from muri.errors import UsageError
from muri.launcher.accumulation.state import local as splitting
from muri.launcher.ahead import tell_ahead
from muri.launcher.checkpoints.loader_position import begin_loop
from muri.launcher.clock import StageClock
from muri.launcher.prefetch import Prefetcher
from muri.profiler.records import STAGES

Batch = TypeVar("Batch")

_INDEX: Final = {name: index for index, name in enumerate(STAGES)}
_LOAD: Final = _INDEX["load"]


class StageNameError(UsageError, ValueError):
    """A script named a stage that does not exist."""


class PrefetchError(UsageError, ValueError):
    """A script asked for a prefetch that does not exist."""


class _Provider:
    """Finds the clock of the script that is calling."""

    def __init__(self) -> None:
        self.current: Callable[[], StageClock] = self.solo
        self._solo: StageClock | None = None
        self._making = threading.Lock()

    def solo(self) -> StageClock:
        """The one clock of a process that runs one script."""
        if self._solo is None:
            from muri.launcher.measure import clock_from_environment  # (only when needed)

            with self._making:  # two threads may mark their first stage at once
                if self._solo is None:
                    self._solo = clock_from_environment(os.environ)
        return self._solo

    def detach(self) -> None:
        """In a forked child: measure for nobody, wait for nobody."""
        self._solo = StageClock()
        self.current = self.solo


_provider = _Provider()
os.register_at_fork(after_in_child=_provider.detach)


def current_clock() -> StageClock:
    """The clock of the script that the calling thread belongs to."""
    return _provider.current()


def set_clock_provider(provider: Callable[[], StageClock | None]) -> None:
    """Let the runtime say whose clock a thread uses; None stands for the process's own."""
    _provider.current = lambda: provider() or _provider.solo()


class stage:  # noqa: N801 (used as a function: `with muri.stage("load")`)
    """Mark a part of the training loop: `with muri.stage("propagate"): …`.

    Inside another stage the inner one counts and the outer one goes on after it. The same
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
            raise StageNameError(_unknown_stage(name))
        self._index = index
        self._clock: StageClock | None = None

    def __enter__(self) -> None:
        """Wait for the stage's resource, if the script shares it, and begin."""
        clock = _provider.current()
        if not clock.explicit:
            clock.become_explicit()
        clock.enter(self._index)
        self._clock = clock

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the stage and pass its resource on."""
        clock, self._clock = self._clock, None
        if clock is not None and clock is _provider.current():
            clock.leave()


class batches(Generic[Batch]):  # noqa: N801 (used as a function: `for batch in muri.batches(loader)`)
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

    def __len__(self) -> int:
        """Batches per epoch, if the loader knows."""
        return len(self._loader)  # type: ignore[arg-type] # raises TypeError as the loader itself would

    def __iter__(self) -> Iterator[Batch]:
        """Start an epoch."""
        clock = _provider.current()
        if not clock.explicit:
            clock.become_explicit()
        clock.ask_batch()
        if self._prefetch:
            splitting.refuse("muri.batches(…, prefetch=1) fetches batches ahead of the loop")
        tell_ahead(clock, self._loader, int(self._prefetch))
        with stage("load"):
            source = begin_loop(self._loader, self._site, clock.yield_point)
        yield from self._go_through(clock, Prefetcher(source, clock) if self._prefetch else _Fetcher(source))

    @staticmethod
    def _go_through(clock: StageClock, fetch: "Prefetcher[Batch] | _Fetcher[Batch]") -> Iterator[Batch]:
        try:
            while True:
                try:
                    batch = fetch()
                except StopIteration:
                    clock.drop_iteration()
                    return
                yield batch
                del batch
                if not splitting.amid_batch:
                    clock.ask_batch()
        except GeneratorExit:  # the loop was left with `break`: its last iteration is done
            clock.end_iteration()
            raise
        finally:
            fetch.close()


class _Fetcher(Generic[Batch]):
    """Fetches each batch when the loop asks for it."""

    def __init__(self, source: Iterator[Batch]) -> None:
        self._source = source

    def __call__(self) -> Batch:
        with stage("load"):
            return next(self._source)

    def close(self) -> None:
        """Nothing goes on beside the loop."""


def yield_point() -> None:
    """Inside a long stage: let a member that is further behind use the resource first."""
    _provider.current().yield_point()


def _unknown_stage(name: object) -> str:
    text = f"there is no stage {name!r}; the stages are {', '.join(STAGES)}"
    near = difflib.get_close_matches(str(name), STAGES, n=1, cutoff=0.5)
    return f"{text}. Did you mean {near[0]!r}?" if near else text
