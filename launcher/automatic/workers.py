"""Measures what DataLoader workers do and counts it in the process that waits for them.

Forked workers inherit a board of shared memory and add up their seconds there. Workers that are spawned
import PyTorch anew and without hooks: they work the same and are not measured.
"""

import functools
import mmap
import struct
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, Final

from torch.utils.data import _utils, dataloader

from muri.launcher.automatic.transforms import Meter, metered
from muri.launcher.automatic.watch import LOAD, PREPROCESS, Watch, replace, switch_off, watching

_HOOK: Final = "DataLoader workers"
_CELL: Final = struct.Struct("dd")
_FIRST_EXTRA: Final = 10
"""Position of `worker_id` among the arguments of PyTorch's worker loop."""


class Board:
    """Seconds of `load` and `preprocess` that each worker of one iterator has spent so far."""

    def __init__(self, workers: int) -> None:
        self._memory = mmap.mmap(-1, max(1, workers) * _CELL.size)
        self._workers = workers
        self._settled = (0.0, 0.0)

    def add(self, worker: int, load_s: float, preprocess_s: float) -> None:
        """Count a worker's fetch; called in the worker."""
        before = _CELL.unpack_from(self._memory, worker * _CELL.size)
        _CELL.pack_into(self._memory, worker * _CELL.size, before[0] + load_s, before[1] + preprocess_s)

    def news(self) -> tuple[float, float]:
        """What all workers spent since the last call, divided by their number.

        They work side by side: so much of the time the loading as a whole was busy.
        """
        cells = [_CELL.unpack_from(self._memory, worker * _CELL.size) for worker in range(self._workers)]
        total = sum(cell[0] for cell in cells), sum(cell[1] for cell in cells)
        settled, self._settled = self._settled, total
        return (total[0] - settled[0]) / self._workers, (total[1] - settled[1]) / self._workers


class _Forking(threading.local):
    board: Board | None = None


_forking: Final = _Forking()
"""The board of the iterator that this thread is making: workers are forked meanwhile."""


def settle(watch: Watch, iterator: Any) -> None:
    """Count what the iterator's workers did since its last batch."""
    board = iterator.__dict__.get("_muri_board")
    if board is not None:
        load_s, preprocess_s = board.news()
        watch.clock.add_held(LOAD, load_s)
        watch.clock.add_held(PREPROCESS, preprocess_s)


def install() -> None:
    """Patch the start of workers, here, and their fetching, there."""
    plain_init = dataloader._MultiProcessingDataLoaderIter.__init__
    plain_loop = _utils.worker._worker_loop

    @functools.wraps(plain_init)
    def make_iterator(iterator: Any, loader: Any) -> None:
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


def _make_board(loader: Any) -> Board | None:
    try:
        return Board(loader.num_workers) if watching(_HOOK) is not None else None
    except Exception as error:
        switch_off(_HOOK, error)
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
        read_s = time.perf_counter() - wall_s - meter.wall_s
        computed_s = min(read_s, time.thread_time() - cpu_s - meter.cpu_s)
        board.add(worker, read_s - computed_s, meter.wall_s + computed_s)
