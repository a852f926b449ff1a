"""Hooks of `torch.utils.data.DataLoader`: time that batches take to fetch, in this process and in workers.

An iteration begins when the script asks for a batch. Without workers the fetch runs in this process and is a stage:
`load` if reading the samples mostly waits, `preprocess` if it mostly computes; transforms and `collate_fn` are
`preprocess`. With workers this process only waits for them: it holds nothing, and its time counts as their work did.
Forked workers inherit a board in shared memory and add their seconds there. Spawned workers import PyTorch anew,
without hooks: they work as usual and are not measured.
"""

from __future__ import annotations

import functools
import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from torch.utils.data import Subset, _utils, dataloader

from muri.launcher.job.stage_clock import LOAD, PREPROCESS, StageClock
from muri.launcher.script.hooks import Watch, offer_to_yield, replace, switch_off, thread, watching
from muri.launcher.script.script_clock import current_clock

_NAMES: Final = ("transform", "transforms", "target_transform")
_MAX_DATASETS: Final = 16

_WORKERS_HOOK: Final = "DataLoader workers"
KEPT_FETCHES: Final = 16
"""Of the fetches between two batches each worker's last ones are known."""

_TIMES: Final = 3
_BLOCK: Final = 1 + KEPT_FETCHES * _TIMES
_FIRST_EXTRA: Final = 10
"""Position of `worker_id` among the arguments of PyTorch's worker loop."""

RECENT_FETCHES: Final = 16
COMPUTES_FROM: Final = 0.5
WAITS_BELOW: Final = 0.35
"""Reading is `preprocess` from this share of CPU time in its wall time on, and `load` again below that one."""

SLOW_TRANSFORM_S: Final = 0.002
"""Transforms that take longer on average are stages of their own; faster ones are only counted."""

_FETCHING_HOOK: Final = "DataLoader"


class Meter:
    """Time that the transforms and `collate_fn` of one dataset took in the current fetch."""

    def __init__(self, clock: StageClock | None) -> None:
        self._clock = clock
        self._calls = 0
        self._total_s = 0.0
        self._running = False
        self.start()

    def start(self) -> None:
        """Begin a fetch."""
        self.wall_s = self.cpu_s = 0.0  # in all of them; the CPU seconds are the thread's
        self.counted_s = 0.0  # wall-clock seconds in those that were not a stage of their own
        is_slow = 0 < SLOW_TRANSFORM_S * self._calls <= self._total_s
        self._gated = self._clock is not None and self._clock.shared and is_slow

    def transform(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a transform; a transform inside another counts as part of it."""
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
        """Any other attribute of the transform."""
        return getattr(self._function, name)


@contextmanager
def metered(fetcher: Any, dataset: Any, meter: Meter) -> Iterator[None]:
    """Meter `collate_fn` and the transforms of the dataset, and of those inside it, until the fetch is done."""
    collate = fetcher.collate_fn
    fetcher.collate_fn = collating = lambda samples: meter.run(collate, (samples,), {}, gated=True)
    lent: list[tuple[dict[str, Any], str, Any, Any]] = [(fetcher.__dict__, "collate_fn", collating, collate)]
    for own in _attributes(dataset):
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


def _attributes(dataset: Any) -> Iterator[dict[str, Any]]:
    """The attributes of the dataset and of those inside it: Subset, ConcatDataset and similar ones."""
    parts: list[Any] = [dataset]
    for part in parts:
        own = getattr(part, "__dict__", None)
        if not isinstance(own, dict):
            continue
        if len(parts) < _MAX_DATASETS:
            several = own.get("datasets")
            inner = [own.get("dataset"), *(several if isinstance(several, (list, tuple)) else ())]
            parts.extend(one for one in inner if one is not None and all(one is not known for known in parts))
        yield own


class Board:
    """For each worker of one iterator a block of numbers: how many fetches, and the times of the last ones.

    Times are on `time.perf_counter`, which all processes of a machine share: when a fetch began, when its `load` part
    was over, as if all reading came first, and when the rest, its `preprocess` part, was.
    """

    def __init__(self, workers: int) -> None:
        self._numbers = memoryview(mmap.mmap(-1, max(1, workers) * _BLOCK * 8)).cast("d")
        self._seen = [0] * workers
        self.load_share = 1.0  # of the work that was looked at last

    def add(self, worker: int, start_s: float, read_until_s: float, end_s: float) -> None:
        """Count a worker's fetch; called in the worker."""
        block = self._numbers[worker * _BLOCK : (worker + 1) * _BLOCK]
        place = 1 + int(block[0]) % KEPT_FETCHES * _TIMES
        block[place], block[place + 1], block[place + 2] = start_s, read_until_s, end_s
        block[0] += 1

    def look(self) -> list[tuple[int, float, float, float]]:
        """Return the parts of the fetches since the last call: stage, start, end and the workers' share in it."""
        parts = []
        for worker, seen in enumerate(self._seen):
            block = self._numbers[worker * _BLOCK : (worker + 1) * _BLOCK]
            count = self._seen[worker] = int(block[0])
            for number in range(max(seen, count - KEPT_FETCHES), count):
                place = 1 + number % KEPT_FETCHES * _TIMES
                start_s, read_until_s, end_s = block[place : place + _TIMES]
                parts.append((LOAD, start_s, read_until_s, 1 / len(self._seen)))
                parts.append((PREPROCESS, read_until_s, end_s, 1 / len(self._seen)))
        if total_s := sum(end_s - start_s for _, start_s, end_s, _ in parts):
            self.load_share = sum(end_s - start_s for stage, start_s, end_s, _ in parts if stage == LOAD) / total_s
        return parts


_forking: Final = threading.local()
"""The board of the iterator that this thread is making, which forks its workers meanwhile."""


class WorkersWait:
    """The loop waits for a batch of worker processes.

    It holds nothing meanwhile: a resource held would keep partners out without use. Its time is told as the workers'
    work. Their work while the loop computes is hidden behind that, and only a dry run hears of it.
    """

    def __init__(self, watch: Watch, iterator: Any) -> None:
        self._clock = watch.clock
        self._board: Board | None = iterator.__dict__.get("_muri_board")
        self._waits = self._clock.begin_fetch_wait()

    def end(self) -> None:
        """The batch is there, or will not come."""
        parts = self._board.look() if self._board is not None else []
        if self._waits:
            # Workers that are spawned tell nothing of themselves: they are there to read.
            self._clock.end_fetch_wait(self._board.load_share if self._board is not None else 1.0)
        for part in parts:
            self._clock.note_work(*part)


def install_workers() -> None:
    """Patch the start of workers in this process, and their fetching in theirs."""
    plain_init = dataloader._MultiProcessingDataLoaderIter.__init__
    plain_loop = _utils.worker._worker_loop

    @functools.wraps(plain_init)
    def make_iterator(iterator: Any, loader: Any) -> None:
        board = _forking.board = _prepare(loader)
        try:
            plain_init(iterator, loader)
        finally:
            _forking.board = None
        iterator._muri_board = board

    @functools.wraps(plain_loop)  # pickled by that name, so that a spawned worker runs PyTorch's own
    def loop(*args: Any) -> None:
        board = getattr(_forking, "board", None)
        if board is not None:
            _measure_fetches(board, int(args[_FIRST_EXTRA]))
        plain_loop(*args)

    replace(dataloader._MultiProcessingDataLoaderIter, "__init__", make_iterator)
    replace(_utils.worker, "_worker_loop", loop)


def _prepare(loader: Any) -> Board | None:
    """Report how far a loader fetches ahead, also in a script that marks its stages; return its workers' board."""
    try:
        current_clock().report_prefetch_depth(loader)
        return Board(loader.num_workers) if watching(_WORKERS_HOOK) is not None else None
    except Exception as error:
        switch_off(_WORKERS_HOOK, error)
        return None


def _measure_fetches(board: Board, worker: int) -> None:
    """Let every fetcher add its times to the board; runs in a worker."""
    plain: Callable[..., Any] = dataloader._DatasetKind.create_fetcher

    def create_fetcher(kind: Any, dataset: Any, *rest: Any) -> Any:
        fetcher = plain(kind, dataset, *rest)
        meter = Meter(None)
        fetch = fetcher.fetch

        def measured_fetch(index: Any) -> Any:
            """Transforms, collating and the CPU time of reading are `preprocess`, the rest is `load`."""
            meter.start()
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            try:
                with metered(fetcher, dataset, meter):
                    return fetch(index)
            finally:
                end_s = time.perf_counter()
                read_s = end_s - wall_s - meter.wall_s
                computed_s = min(read_s, time.thread_time() - cpu_s - meter.cpu_s)
                board.add(worker, wall_s, wall_s + read_s - computed_s, end_s)

        fetcher.fetch = measured_fetch
        return fetcher

    replace(dataloader._DatasetKind, "create_fetcher", staticmethod(create_fetcher))


class ReadKind:
    """Decides from the last reads whether a dataset's samples come from storage or are computed."""

    def __init__(self) -> None:
        self.stage = LOAD
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_FETCHES)

    def add(self, wall_s: float, cpu_s: float) -> None:
        """Add one read: its wall-clock seconds, and the thread's CPU seconds within them."""
        self._recent.append((wall_s, cpu_s))
        wall, cpu = (sum(column) for column in zip(*self._recent))
        if cpu >= COMPUTES_FROM * wall:
            self.stage = PREPROCESS
        elif cpu < WAITS_BELOW * wall:
            self.stage = LOAD


class YieldingDataset:
    """A map-style dataset with yield points between two samples."""

    __getitems__ = None  # PyTorch's fetcher then reads one sample after the other, also of a Subset

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        """The dataset's own sample."""
        offer_to_yield(_FETCHING_HOOK)
        return self._dataset[index]

    def __getattr__(self, name: str) -> Any:
        """Any other attribute of the dataset."""
        return getattr(self._dataset, name)


def _reads_batches(dataset: Any) -> bool:
    """Whether the dataset reads batches at once; a plain Subset does if the dataset inside it does."""
    if type(dataset) is Subset:
        return _reads_batches(dataset.dataset)
    return bool(getattr(dataset, "__getitems__", None))


def yielding_samples(samples: Iterator[Any]) -> Iterator[Any]:
    """The samples of an iterable dataset, with yield points in between."""
    for sample in samples:
        offer_to_yield(_FETCHING_HOOK)
        yield sample


class Fetch:
    """One fetch in this process, from entering its stage to leaving it."""

    def __init__(self, watch: Watch, iterator: Any) -> None:
        self._clock = watch.clock
        self._kind: ReadKind = watch.memory.setdefault((ReadKind, id(iterator._dataset)), ReadKind())
        self._meter: Meter = watch.memory.setdefault((Meter, id(iterator._dataset)), Meter(watch.clock))
        self._stage = self._kind.stage
        with ExitStack() as cleanup:  # what the fetcher is lent goes back, whatever fails
            self._clock.enter(self._stage)
            cleanup.callback(self._clock.leave)
            turns = self._clock.takes_turns  # else no member waits, and each sample would pay for the question
            thread.yield_due_s = 0.0 if turns else float("inf")
            self._meter.start()
            fetcher = iterator._dataset_fetcher
            cleanup.enter_context(metered(fetcher, iterator._dataset, self._meter))
            if turns:
                _lend_yield_points(fetcher)
            self._cleanup = cleanup.pop_all()
        self._waited_s = sum(self._clock.wait_s)
        self._wall_s, self._cpu_s = time.perf_counter(), time.thread_time()

    def end(self) -> None:
        """Leave the stage, and tell the next fetches what to expect."""
        wall_s, cpu_s = time.perf_counter() - self._wall_s, time.thread_time() - self._cpu_s
        waited_s = sum(self._clock.wait_s) - self._waited_s
        meter = self._meter
        self._cleanup.close()
        if self._stage != PREPROCESS and meter.counted_s:
            self._clock.move(self._stage, PREPROCESS, meter.counted_s)
            end_s = self._wall_s + wall_s
            self._clock.note_work(PREPROCESS, end_s - meter.counted_s, end_s, 1.0, own=True)
        self._kind.add(max(1e-9, wall_s - meter.wall_s - waited_s), max(0.0, cpu_s - meter.cpu_s))


def _lend_yield_points(fetcher: Any) -> None:
    if not hasattr(fetcher, "dataset_iter"):
        # A batch that is read at once needs none: `collate_fn`, a stage of its own, follows.
        if not (isinstance(fetcher.dataset, YieldingDataset) or _reads_batches(fetcher.dataset)):
            fetcher.dataset = YieldingDataset(fetcher.dataset)
    elif not getattr(fetcher, "_muri_yields", False):
        fetcher.dataset_iter = yielding_samples(fetcher.dataset_iter)
        fetcher._muri_yields = True


def install_fetching() -> None:
    """Patch the iterators of DataLoader."""
    plain = dataloader._BaseDataLoaderIter.__next__

    @functools.wraps(plain)
    def next_batch(iterator: Any) -> Any:
        begun = None if thread.busy else _begin(iterator)
        if begun is None:
            return plain(iterator)
        watch, fetch = begun
        thread.busy = True
        try:
            return plain(iterator)
        except StopIteration:
            watch.iterations.over(id(iterator))
            raise
        finally:
            thread.busy = False
            _end(fetch)

    replace(dataloader._BaseDataLoaderIter, "__next__", next_batch)


def _begin(iterator: Any) -> tuple[Watch, Fetch | WorkersWait] | None:
    """Note the boundary of the iteration, and begin the fetch; None where the hook must do nothing."""
    try:
        watch = watching(_FETCHING_HOOK)
        if watch is None:
            return None
        if not thread.depth and watch.is_trainer(trains=False):
            if iterator not in watch.iterators:
                watch.iterators.add(iterator)
                weakref.finalize(iterator, watch.iterations.over, id(iterator)).atexit = False
            watch.iterations.ask(iterator)
        return watch, (Fetch if hasattr(iterator, "_dataset_fetcher") else WorkersWait)(watch, iterator)
    except Exception as error:
        switch_off(_FETCHING_HOOK, error)
        return None


def _end(fetch: Fetch | WorkersWait) -> None:
    try:
        fetch.end()
    except Exception as error:
        switch_off(_FETCHING_HOOK, error)
