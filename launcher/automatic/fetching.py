"""Hooks of `torch.utils.data.DataLoader` in the process that iterates it.

Asking for a batch is where iterations begin. Without workers the fetch runs here and is a stage:
`load` if reading the samples mostly waits, `preprocess` if it mostly computes; transforms and
`collate_fn` are `preprocess`. With workers this process only waits for them, which is no stage.
"""

import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

from torch.utils.data import Subset, dataloader

from muri.launcher.automatic.workers import settle_workers
from muri.launcher.automatic.transforms import Meter, metered
from muri.launcher.automatic.watch import LOAD, PREPROCESS, Watch, offer_to_yield, replace, switch_off, thread, watching

RECENT_FETCHES: Final = 16
COMPUTES_FROM: Final = 0.5
WAITS_BELOW: Final = 0.35
"""Reading is `preprocess` from this share of CPU time in its wall time on, and `load` again below that one."""

SLOW_TRANSFORM_S: Final = 0.002
"""Transforms that take longer on average are stages of their own; faster ones are only counted."""

_FETCHING_HOOK: Final = "DataLoader"


class ReadKind:
    """Decides from the last reads whether a dataset's samples come from storage or are computed."""

    def __init__(self) -> None:
        self.stage = LOAD
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_FETCHES)

    def add(self, wall_s: float, cpu_s: float) -> None:
        """Take what one read took: seconds, and the thread's CPU seconds of them."""
        self._recent.append((wall_s, cpu_s))
        wall, cpu = (sum(column) for column in zip(*self._recent, strict=True))
        if cpu >= COMPUTES_FROM * wall:
            self.stage = PREPROCESS
        elif cpu < WAITS_BELOW * wall:
            self.stage = LOAD


class YieldingDataset:
    """A map-style dataset that lets other members go first between two samples, or two batches read at once."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        """The dataset's own sample."""
        _offer_if_due()
        return self._dataset[index]

    @property
    def __getitems__(self) -> Callable[[Any], Any] | None:
        """The dataset's own reading of a whole batch; None, as PyTorch's fetcher understands it, without one."""
        return self._read_batch if _reads_batches(self._dataset) else None

    def _read_batch(self, indices: Any) -> Any:
        _offer_if_due()
        samples = self._dataset.__getitems__(indices)
        _offer_if_due()
        return samples

    def __getattr__(self, name: str) -> Any:
        """Whatever else the dataset has."""
        return getattr(self._dataset, name)


def _reads_batches(dataset: Any) -> bool:
    """Whether it reads batches at once; a plain Subset only passes that on, else it reads sample by sample."""
    if type(dataset) is Subset:
        return _reads_batches(dataset.dataset)
    return bool(getattr(dataset, "__getitems__", None))


def _offer_if_due() -> None:
    now_s = time.perf_counter()
    if now_s >= thread.yield_due_s:
        offer_to_yield(_FETCHING_HOOK, now_s)


def yielding_samples(samples: Iterator[Any]) -> Iterator[Any]:
    """The samples of an iterable dataset, with yield points in between."""
    for sample in samples:
        _offer_if_due()
        yield sample


class Fetch:
    """One fetch in this process, from entering its stage to leaving it."""

    def __init__(self, watch: Watch, iterator: Any) -> None:
        self._clock = watch.clock
        key = (ReadKind, id(iterator._dataset))
        self._kind: ReadKind = watch.memory.setdefault(key, ReadKind())
        self._meter: Meter = watch.memory.setdefault((Meter, id(iterator._dataset)), Meter(watch.clock))
        self._cleanup = ExitStack()
        self._iterator = iterator

    def begin(self) -> None:
        """Enter the stage and lend the fetcher the metered functions."""
        self._stage = self._kind.stage
        self._clock.enter(self._stage)
        self._cleanup.callback(self._clock.leave)
        thread.yield_due_s = 0.0 if self._clock.shared else float("inf")
        self._meter.start(gated=self._clock.shared and self._meter.mean_s >= SLOW_TRANSFORM_S)
        fetcher = self._iterator._dataset_fetcher
        self._cleanup.enter_context(metered(self._iterator._dataset, self._meter))
        if self._clock.shared:
            _lend_yield_points(fetcher)
        collate = fetcher.collate_fn
        if collate is not None:
            self._cleanup.callback(setattr, fetcher, "collate_fn", collate)
            fetcher.collate_fn = functools.partial(self._collate, collate)
        self._waited_s = sum(self._clock.wait_s)
        self._wall_s, self._cpu_s = time.perf_counter(), time.thread_time()

    def end(self, *, complete: bool) -> None:
        """Leave the stage; a complete fetch tells the next ones what to expect."""
        wall_s, cpu_s = time.perf_counter() - self._wall_s, time.thread_time() - self._cpu_s
        waited_s = sum(self._clock.wait_s) - self._waited_s
        meter = self._meter
        self._cleanup.close()
        if self._stage != PREPROCESS and meter.counted_s:
            self._clock.add_held(PREPROCESS, meter.counted_s)
            self._clock.add_held(self._stage, -meter.counted_s)
            end_s = self._wall_s + wall_s
            self._clock.note_work(PREPROCESS, end_s - meter.counted_s, end_s, 1.0, own=True)
        if complete:
            self._kind.add(max(1e-9, wall_s - meter.wall_s - waited_s), max(0.0, cpu_s - meter.cpu_s))

    def _collate(self, collate: Any, samples: Any) -> Any:
        return self._meter.run(collate, (samples,), {}, gated=True)


def _lend_yield_points(fetcher: Any) -> None:
    if hasattr(fetcher, "dataset_iter"):
        if not getattr(fetcher, "_muri_yields", False):
            fetcher.dataset_iter = yielding_samples(fetcher.dataset_iter)
            fetcher._muri_yields = True
    elif not isinstance(fetcher.dataset, YieldingDataset):
        fetcher.dataset = YieldingDataset(fetcher.dataset)


def install_fetching() -> None:
    """Patch the iterators of DataLoader."""
    plain = dataloader._BaseDataLoaderIter.__next__

    @functools.wraps(plain)
    def next_batch(iterator: Any) -> Any:
        if thread.busy:
            return plain(iterator)
        watch = _ask(iterator)
        if watch is None:
            return plain(iterator)
        fetch = _begin(watch, iterator)
        complete, thread.busy = False, True
        try:
            batch = plain(iterator)
            complete = True
        except StopIteration:
            watch.iterations.exhausted(iterator)
            raise
        finally:
            thread.busy = False
            _end(watch, iterator, fetch, complete=complete)
        return batch

    replace(dataloader._BaseDataLoaderIter, "__next__", next_batch)


def _ask(iterator: Any) -> Watch | None:
    """The watch that this fetch concerns, with the boundary of the iteration noted."""
    try:
        watch = watching(_FETCHING_HOOK)
        if watch is not None and not thread.depth and watch.is_trainer(trains=False):
            if id(iterator) not in watch.memory:
                forget = functools.partial(_forget, weakref.ref(watch), id(iterator))
                watch.memory[id(iterator)] = weakref.ref(iterator, forget)
            watch.iterations.ask(iterator)
    except Exception as error:
        switch_off(_FETCHING_HOOK, error)
        return None
    return watch


def _forget(reference: "weakref.ref[Watch]", key: int, _iterator: Any) -> None:
    watch = reference()
    if watch is not None:
        watch.memory.pop(key, None)
        watch.iterations.forgotten(key)


def _begin(watch: Watch, iterator: Any) -> Fetch | None:
    if not hasattr(iterator, "_dataset_fetcher"):
        return None  # workers fetch
    fetch = Fetch(watch, iterator)
    try:
        fetch.begin()
    except BaseException as error:
        fetch._cleanup.close()
        if not isinstance(error, Exception):
            raise
        switch_off(_FETCHING_HOOK, error)
        return None
    return fetch


def _end(watch: Watch, iterator: Any, fetch: Fetch | None, *, complete: bool) -> None:
    try:
        if fetch is not None:
            fetch.end(complete=complete)
        else:
            settle_workers(watch, iterator)
    except Exception as error:
        switch_off(_FETCHING_HOOK, error)
