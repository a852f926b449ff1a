"""Times the transforms of datasets while a batch is fetched, without changing what the script sees."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from muri.launcher.automatic.watch import PREPROCESS
from muri.launcher.clock import StageClock

_NAMES: Final = ("transform", "transforms", "target_transform")
_MAX_DATASETS: Final = 16


class Meter:
    """What the transforms and `collate_fn` of one dataset took in the fetch under way.

    Attributes:
        wall_s: Seconds in all of them.
        cpu_s: CPU seconds of the thread in them.
        counted_s: Seconds in those that were no stage of their own.
        mean_s: Mean seconds of a transform, over all fetches.
    """

    def __init__(self, clock: StageClock | None) -> None:
        self._clock = clock
        self._calls = 0
        self._total_s = 0.0
        self._running = False
        self.start(gated=False)

    @property
    def mean_s(self) -> float:
        """Mean seconds of a transform, over all fetches."""
        return self._total_s / self._calls if self._calls else 0.0

    def start(self, *, gated: bool) -> None:
        """A fetch begins.

        Args:
            gated: Whether each transform is a stage of its own.
        """
        self.wall_s = self.cpu_s = self.counted_s = 0.0
        self._gated = gated

    def transform(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a transform; one inside another is part of it."""
        if self._running:
            return function(*args, **kwargs)
        before_s = self.wall_s
        self._running = True
        try:
            return self.run(function, args, kwargs, gated=self._gated)
        finally:
            self._running = False
            self._calls += 1
            self._total_s += self.wall_s - before_s

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, gated: bool) -> Any:
        """Call a function and note its time; gated, it is the stage `preprocess`."""
        clock = self._clock if gated else None
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        if clock is not None:
            clock.enter(PREPROCESS)
        try:
            return function(*args, **kwargs)
        finally:
            if clock is not None:
                clock.leave()
            took_s = time.perf_counter() - wall_s
            self.wall_s += took_s
            self.cpu_s += time.thread_time() - cpu_s
            if clock is None:
                self.counted_s += took_s


class Metered:
    """Stands for a transform during a fetch."""

    def __init__(self, function: Callable[..., Any], meter: Meter) -> None:
        self._function = function
        self._meter = meter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the transform under the meter."""
        return self._meter.transform(self._function, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the transform has."""
        return getattr(self._function, name)


@contextmanager
def metered(dataset: Any, meter: Meter) -> Iterator[None]:
    """Put metered transforms into the dataset, and into those it is made of, until the fetch is done."""
    lent: list[tuple[dict[str, Any], str, Metered, Any]] = []
    for part in _parts(dataset):
        own = getattr(part, "__dict__", None)
        if not isinstance(own, dict):
            continue
        for name in _NAMES:
            function = own.get(name)
            if callable(function) and not isinstance(function, Metered):
                own[name] = stand_in = Metered(function, meter)
                lent.append((own, name, stand_in, function))
    try:
        yield
    finally:
        for own, name, stand_in, function in lent:
            if own.get(name) is stand_in:  # the dataset may have set another one meanwhile
                own[name] = function


def _parts(dataset: Any) -> list[Any]:
    """The dataset and those inside it: Subset, ConcatDataset and the like."""
    parts: list[Any] = [dataset]
    for part in parts:
        own = getattr(part, "__dict__", None)
        inner = [own.get("dataset")] if isinstance(own, dict) else []
        several = own.get("datasets") if isinstance(own, dict) else None
        inner.extend(several if isinstance(several, list | tuple) else [])
        parts.extend(one for one in inner if one is not None and all(one is not known for known in parts))
        if len(parts) >= _MAX_DATASETS:
            break
    return parts
