"""Measures what DataLoader workers do and counts it in the process that waits for them.

Forked workers inherit a board of shared memory and add up their seconds there. Workers that are spawned
import PyTorch anew and without hooks: they work the same and are not measured.
"""

import functools
import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from torch.utils.data import _utils, dataloader

from muri.launcher.ahead import tell_ahead
from muri.launcher.automatic.transforms import Meter, metered
from muri.launcher.automatic.watch import LOAD, PREPROCESS, Watch, replace, switch_off, watching
from muri.launcher.stages import current_clock

_WORKERS_HOOK: Final = "DataLoader workers"
KEPT_FETCHES: Final = 16
"""So many fetches of each worker are told of between two batches."""

_CELL: Final = struct.Struct("ddd")  # seconds of load and of preprocess, number of fetches
_FETCH: Final = struct.Struct("ddd")
_BLOCK_BYTES: Final = _CELL.size + KEPT_FETCHES * _FETCH.size
_FIRST_EXTRA: Final = 10
"""Position of `worker_id` among the arguments of PyTorch's worker loop."""


@dataclass(frozen=True, slots=True)
class FetchTimes:
    """When a worker fetched a batch, on `time.perf_counter`, which all processes of a machine share.

    Attributes:
        start_s: Begin.
        read_until_s: Its reading is counted as if done first, up to here; the rest is `preprocess`.
        end_s: End.
    """

    start_s: float
    read_until_s: float
    end_s: float


class Board:
    """What each worker of one iterator has done so far: seconds of `load` and `preprocess`, and its last fetches."""

    def __init__(self, workers: int) -> None:
        self._memory = mmap.mmap(-1, max(1, workers) * _BLOCK_BYTES)
        self.workers = workers
        self._settled = (0.0, 0.0)
        self._seen = [0] * workers

    def add(self, worker: int, fetch: FetchTimes) -> None:
        """Count a worker's fetch; called in the worker."""
        block = worker * _BLOCK_BYTES
        load_s, preprocess_s, count = _CELL.unpack_from(self._memory, block)
        place = block + _CELL.size + int(count) % KEPT_FETCHES * _FETCH.size
        _FETCH.pack_into(self._memory, place, fetch.start_s, fetch.read_until_s, fetch.end_s)
        load_s += fetch.read_until_s - fetch.start_s
        preprocess_s += fetch.end_s - fetch.read_until_s
        _CELL.pack_into(self._memory, block, load_s, preprocess_s, count + 1)

    def news(self) -> tuple[float, float]:
        """What all workers spent since the last call, divided by their number.

        They work side by side: so much of the time the loading as a whole was busy.
        """
        cells = [_CELL.unpack_from(self._memory, worker * _BLOCK_BYTES) for worker in range(self.workers)]
        total = sum(cell[0] for cell in cells), sum(cell[1] for cell in cells)
        settled, self._settled = self._settled, total
        return (total[0] - settled[0]) / self.workers, (total[1] - settled[1]) / self.workers

    def fetches(self) -> Iterator[FetchTimes]:
        """The fetches since the last call; of very many, the last ones."""
        for worker, seen in enumerate(self._seen):
            block = worker * _BLOCK_BYTES
            count = int(_CELL.unpack_from(self._memory, block)[2])
            self._seen[worker] = count
            for number in range(max(seen, count - KEPT_FETCHES), count):
                place = block + _CELL.size + number % KEPT_FETCHES * _FETCH.size
                yield FetchTimes(*_FETCH.unpack_from(self._memory, place))


class _Forking(threading.local):
    board: Board | None = None


_forking: Final = _Forking()
"""The board of the iterator that this thread is making: workers are forked meanwhile."""


def settle_workers(watch: Watch, iterator: Any) -> None:
    """Count what the iterator's workers did since its last batch."""
    board = iterator.__dict__.get("_muri_board")
    if board is not None:
        load_s, preprocess_s = board.news()
        watch.clock.add_held(LOAD, load_s)
        watch.clock.add_held(PREPROCESS, preprocess_s)
        if watch.clock.on_hold is not None:
            for fetch in board.fetches():
                watch.clock.note_work(LOAD, fetch.start_s, fetch.read_until_s, 1 / board.workers)
                watch.clock.note_work(PREPROCESS, fetch.read_until_s, fetch.end_s, 1 / board.workers)


def install_workers() -> None:
    """Patch the start of workers, here, and their fetching, there."""
    plain_init = dataloader._MultiProcessingDataLoaderIter.__init__
    plain_loop = _utils.worker._worker_loop

    @functools.wraps(plain_init)
    def make_iterator(iterator: Any, loader: Any) -> None:
        _tell_ahead(loader)
        board = _make_board(loader)
        _forking.board = board
        try:
            plain_init(iterator, loader)
        finally:
            _forking.board = None
        iterator._muri_board = board

    @functools.wraps(plain_loop)  # pickled by that name, so that a spawned worker runs PyTorch's own
    def loop(*args: Any) -> None:
        board = _forking.board
        if board is not None:
            _measure_fetches(board, int(args[_FIRST_EXTRA]))
        plain_loop(*args)

    replace(dataloader._MultiProcessingDataLoaderIter, "__init__", make_iterator)
    replace(_utils.worker, "_worker_loop", loop)


def _tell_ahead(loader: Any) -> None:
    """Also in a script that marks its stages itself."""
    try:
        tell_ahead(current_clock(), loader)
    except Exception as error:
        switch_off(_WORKERS_HOOK, error)


def _make_board(loader: Any) -> Board | None:
    try:
        return Board(loader.num_workers) if watching(_WORKERS_HOOK) is not None else None
    except Exception as error:
        switch_off(_WORKERS_HOOK, error)
        return None


def _measure_fetches(board: Board, worker: int) -> None:
    """In a worker: let every fetcher add its times to the board."""
    plain: Callable[..., Any] = dataloader._DatasetKind.create_fetcher

    def create_fetcher(kind: Any, dataset: Any, *rest: Any) -> Any:
        fetcher = plain(kind, dataset, *rest)
        meter = Meter(None)
        fetch, collate = fetcher.fetch, fetcher.collate_fn

        def measured_fetch(index: Any) -> Any:
            with _on_board(board, worker, meter), metered(dataset, meter):
                return fetch(index)

        fetcher.fetch = measured_fetch
        if collate is not None:
            fetcher.collate_fn = lambda samples: meter.run(collate, (samples,), {}, gated=False)
        return fetcher

    replace(dataloader._DatasetKind, "create_fetcher", staticmethod(create_fetcher))


@contextmanager
def _on_board(board: Board, worker: int, meter: Meter) -> Any:
    """Transforms and collating count as preprocess; of reading, what the CPU does, and the rest as load."""
    meter.start(gated=False)
    wall_s, cpu_s = time.perf_counter(), time.thread_time()
    try:
        yield
    finally:
        end_s = time.perf_counter()
        read_s = end_s - wall_s - meter.wall_s
        computed_s = min(read_s, time.thread_time() - cpu_s - meter.cpu_s)
        board.add(worker, FetchTimes(wall_s, wall_s + read_s - computed_s, end_s))
