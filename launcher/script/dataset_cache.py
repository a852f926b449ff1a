"""`muri.cache`: keeps a fixed part of a dataset in memory, so that every epoch hits for the same share.

Training reads each item once per epoch in random order. A cache that makes room for new items, such
as the page cache, throws away what comes round next; keeping what came first and replacing nothing
gives a hit rate of cache size over dataset size in every epoch (MinIO, in Synergy, section 3.1). It is also the
hit rate that `muri profile run --sweep` counts on.

Without a given size it is the job's memory less the need of its processes. Synergy's plan gives a job memory for its
processes and for its cache (`policies/allocation`), and Slurm tells the job the sum. The need of the processes is
measured while the cache fills, when model and workers have long been there.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import math
import mmap
import multiprocessing.context
import operator
import os
import pickle
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import Any, Final

from muri.clock import GIB, MIB
from muri.errors import UsageError
from muri.launcher.job.environment import descendants_of
from muri.profiler.dryrun.messages import DRY_RUN_VARIABLE, FULL_MEMORY_VARIABLE, NO_JOB

logger = logging.getLogger("muri.launcher")

WORDS: Final = 8
"""Whole numbers of 8 bytes that one dataset takes, shared by all processes that read it."""

_OWNER, _ELSEWHERE, _ITEMS, _BYTES, _FETCH_NS, _BLOCKED_NS, _COVERED_NS, _UNTIL_NS = range(WORDS)

UNSEEN_SHARE: Final = 0.01
"""Where fetching blocks for a smaller share of its time, it hardly reads: memory would change nothing."""

_WAITS: Final = Path("/proc/thread-self/schedstat")

_WORD: Final = 8
_USED, _KEPT, _LIMIT, _LOOK_AT, _READS = range(5)
_HEADER_WORDS: Final = _READS + WORDS
_REFUSED: Final = -1

_FEW: Final = 32
"""So many items stand for all where a dataset is to be read as from full memory: the page cache soon has them."""


class CacheError(UsageError, ValueError):
    """A script asked for a cache that is not possible."""


def cache(dataset: Any, *, gib: float | None = None) -> CachedDataset:
    """Keep items of a map-style dataset in memory, in all of its loader's workers, until `gib` are full.

    The first items that are read stay, and none is replaced. Wrap what reads and decodes; random
    augmentation belongs outside, or its first outcome is what every later epoch sees.

    Args:
        dataset: Has `__len__` and `__getitem__` with whole numbers, such as torch.utils.data.Dataset.
        gib: Most memory, in GiB, for all workers together. None: what the job was given less what its processes
            need, and a tenth to spare; nothing is kept where Slurm does not say what that is.

    Returns:
        A dataset that gives equal items, and passes other attributes on to the wrapped one.

    Raises:
        CacheError: The dataset is not map-style, or `gib` is not a usable size.
    """
    return CachedDataset(dataset, gib)


class CachedDataset:
    """A map-style dataset, part of which is kept in shared memory."""

    def __init__(self, dataset: Any, gib: float | None) -> None:
        self.dataset, self._gib, self._length = dataset, gib, _length(dataset)
        if gib is not None:
            if isinstance(gib, bool) or not isinstance(gib, (int, float)) or not (math.isfinite(gib) and gib > 0):
                raise CacheError(f"muri.cache: gib is {gib!r}; give the memory in GiB, for example gib=4")
            table_gib = SharedItems.table_bytes(self._length) / GIB
            if table_gib >= gib:
                table = f"the table of {self._length} items alone takes {table_gib:.3g} GiB"
                raise CacheError(f"muri.cache: gib={gib:g} is too little: {table}")
        self._begin()
        if gib is None:
            if not self._items.given_bytes:
                logger.warning("muri.cache: nothing is kept: nothing says what memory this job was given; give gib=…")
            logger.info("muri.cache: at most %.3g GiB are kept", self.gib)

    def _begin(self) -> None:
        """Keep nothing yet, and as much as the environment of this process allows."""
        self._measured = bool(os.environ.get(DRY_RUN_VARIABLE))
        is_trial = os.environ.get(FULL_MEMORY_VARIABLE) == os.environ.get("SLURM_JOB_ID", NO_JOB)
        self._few = min(_FEW, self._length) if is_trial else None
        limit_bytes = 0 if self._gib is None else int(self._gib * GIB)
        self._items = SharedItems(self._length, limit_bytes, memory_given(os.environ) if self._gib is None else 0)

    def __len__(self) -> int:
        """How many items the wrapped dataset has now."""
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        """The item, kept or from the dataset; the dataset itself judges an index that is not a position in it."""
        place = None if self._few else self._place(index)
        content = None if place is None else self._items.get(place)
        if content is not None:  # the usual case: lists of one would take several times as long
            return pickle.loads(content)
        return self._items_of([index], lambda missed: [self.dataset[one] for one in missed])[0]

    @property
    def __getitems__(self) -> Any:
        """How a DataLoader fetches a whole batch; None where the wrapped dataset cannot."""
        read = getattr(self.dataset, "__getitems__", None)
        return (lambda indices: self._items_of(indices, read)) if callable(read) else None

    @property
    def gib(self) -> float:
        """Most memory, in GiB; where the script did not say, as of the last look at what the processes need."""
        return self._items.limit_bytes / GIB

    @property
    def hit_rate(self) -> float:
        """Share of the items that are kept: in every epoch from the second on, this share hits."""
        return self._items.kept / self._length if self._length else 0.0

    @property
    def kept(self) -> int:
        """How many items are kept."""
        return self._items.kept

    @property
    def used_gib(self) -> float:
        """Memory in use, at most `gib`."""
        return self._items.used_bytes / GIB

    def __getattr__(self, name: str) -> Any:
        """Any other attribute of the wrapped dataset."""
        if name.startswith("__") or name == "dataset":  # copying and pickling ask before there is a dataset
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getstate__(self) -> dict[str, Any]:
        """The same cache in a process that is being spawned; elsewhere a copy begins with an empty one."""
        state = self.__dict__.copy()
        if multiprocessing.context.get_spawning_popen() is None:
            del state["_items"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In the spawned process, or in the copy, which another job may have loaded."""
        self.__dict__.update(state)
        if "_items" not in state:
            self._begin()

    def _place(self, index: Any) -> int | None:
        try:
            place = operator.index(index)
        except TypeError:
            return None
        if place < 0:
            place += self._length
        return place if 0 <= place < self._length else None

    def _kept_bytes(self, place: int, item: Any) -> int:
        """Keep an item if there is room; return its size, 0 for one that was read before or cannot be kept."""
        if not self._items.undecided(place):
            return 0
        try:
            content = encode(item)
        except Exception as error:  # pickling a foreign object may raise anything
            logger.warning("muri.cache: items such as number %d cannot be kept: %s", place, error)
            content = b""
        self._items.put(place, content)
        return len(content)

    def _items_of(self, indices: Sequence[Any], read: Callable[[list[Any]], Iterable[Any]]) -> list[Any]:
        """Return several items; those that are not kept are read in one call."""
        places = [self._place(index) for index in indices]
        if self._few:
            return list(read([i if place is None else place % self._few for i, place in zip(indices, places)]))
        contents = [None if place is None else self._items.get(place) for place in places]
        missed = [number for number, content in enumerate(contents) if content is None]
        fetch = Fetch() if self._measured and missed else None
        items = list(read([indices[number] for number in missed])) if missed else []
        if len(items) != len(missed):
            raise CacheError(
                f"muri.cache: {type(self.dataset).__name__}.__getitems__ gave {len(items)} items of {len(missed)}"
            )
        if fetch is not None:
            fetch.end()
        fresh = dict(zip(missed, items))
        to_keep = {place: item for number, item in fresh.items() if (place := places[number]) is not None}
        sizes = [size for place, item in to_keep.items() if (size := self._kept_bytes(place, item))]
        if fetch is not None and sizes and len(sizes) == len(to_keep):  # else it is not known how much was read
            self._items.count(fetch, sizes)
        return [fresh[number] if content is None else pickle.loads(content) for number, content in enumerate(contents)]


def _length(dataset: Any) -> int:
    """Return the number of a dataset's items; only map-style ones, whose items have numbers, can be cached."""
    kind, torch_data = type(dataset), sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(dataset, torch_data.IterableDataset):
        raise CacheError(
            f"muri.cache: {kind.__name__} is an iterable dataset; only map-style ones, whose items have "
            "numbers, can be cached"
        )
    lacks = [name for name in ("__len__", "__getitem__") if not hasattr(kind, name)]
    if isinstance(dataset, type) or lacks:
        what = f"the class {dataset.__name__}, not an object of it" if isinstance(dataset, type) else kind.__name__
        wanted = f"; it has no {' and no '.join(lacks)}" if lacks else ""
        raise CacheError(f"muri.cache needs a map-style dataset with __len__ and __getitem__, not {what}{wanted}")
    return len(dataset)


_all_items: weakref.WeakSet[SharedItems] = weakref.WeakSet()


class SharedItems:
    """A table of byte strings that only grows, up to a limit; what is in it stays.

    The memory is a file without a name (memfd_create): the kernel frees it with the last process
    that has it open, however that ends. It holds two counters, the limit, what reading took, and for each place
    its offset and length, then the bytes. Writers lock the file; the kernel drops the lock of a killed one. Readers
    don't lock: a place's length is written last, and never changes after. Where
    `given_bytes` returns the memory of the process and its workers; the limit is the unused part, looked up at first
    and again and again while the cache fills.
    """

    def __init__(self, places: int, limit_bytes: int, given_bytes: int = 0) -> None:
        self.places = places
        self.given_bytes = given_bytes
        fd = os.memfd_create("muri-cache", os.MFD_CLOEXEC)
        os.ftruncate(fd, self.table_bytes(places))
        self._adopt(fd)
        self._words[_LIMIT] = limit_bytes
        if given_bytes:
            self._look()

    @staticmethod
    def table_bytes(places: int) -> int:
        """Memory of the table itself."""
        return (_HEADER_WORDS + 2 * places) * _WORD

    def get(self, place: int) -> bytes | None:
        """The content that is kept under a place, None if there is none."""
        length = self._words[_HEADER_WORDS + 2 * place + 1]
        if length <= 0:
            return None
        offset, parts = self._words[_HEADER_WORDS + 2 * place], []
        while length:  # one read is enough: the kernel returns less only for more than 2 GiB
            part = os.pread(self._fd, length, offset)
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def undecided(self, place: int) -> bool:
        """Whether no worker has tried to keep something under the place yet."""
        return self._words[_HEADER_WORDS + 2 * place + 1] == 0

    def put(self, place: int, content: bytes) -> None:
        """Keep bytes under a place, if there is room and no other worker was first; without any, never keep some."""
        index = _HEADER_WORDS + 2 * place
        with self._locked():
            if self._words[index + 1] != 0:
                return
            if self.given_bytes and self._words[_USED] >= self._words[_LOOK_AT]:
                self._look()
            offset = self.table_bytes(self.places) + self._words[_USED]
            length = _REFUSED
            if content and offset + len(content) <= self.limit_bytes:
                self._words[_USED] += len(content)  # before the bytes: a writer killed here leaves a gap, no damage
                with contextlib.suppress(OSError):  # memory is short: keep less
                    _write(self._fd, content, offset)
                    self._words[index], length = offset, len(content)
            self._words[index + 1] = length
            self._words[_KEPT] += length > 0

    def count(self, fetch: Fetch, sizes: Collection[int]) -> None:
        """Count the items that a fetch has read for the first time, by their bytes."""
        with self._locked():
            self._reads.add(fetch, sizes)

    @property
    def kept(self) -> int:
        """How many places hold something."""
        return self._words[_KEPT]

    @property
    def limit_bytes(self) -> int:
        """Most memory, the table included."""
        return self._words[_LIMIT]

    def _look(self) -> None:
        """Set the limit anew by what is left of the memory given."""
        others = sum(items.used_bytes for items in list(_all_items) if items is not self)
        self._words[_LIMIT] = left_bytes(self.given_bytes, self._words[_READS + _OWNER], others)
        self._words[_LOOK_AT] = self._words[_USED] + max(1, self.given_bytes // LOOKS)

    @property
    def used_bytes(self) -> int:
        """Memory in use, the table included."""
        return self.table_bytes(self.places) + self._words[_USED]

    def __getstate__(self) -> dict[str, Any]:
        """Hand the same memory to a process that is being spawned."""
        return {"places": self.places, "given_bytes": self.given_bytes, "fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Attach to the memory in the spawned process."""
        self.places = state["places"]
        self.given_bytes = state["given_bytes"]
        self._adopt(state["fd"].detach())

    def _adopt(self, fd: int) -> None:
        self._fd = fd
        self._table = mmap.mmap(fd, self.table_bytes(self.places))
        self._words = memoryview(self._table).cast("q")
        self._reads = DatasetReads(self._words[_READS:_HEADER_WORDS], self.places)
        self._mutex = threading.Lock()
        weakref.finalize(self, os.close, fd).atexit = False
        _all_items.add(self)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other threads by the mutex, other processes by the file's lock."""
        with self._mutex:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)


def _write(fd: int, content: bytes, offset: int) -> None:
    rest = memoryview(content)
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def _renew_mutexes() -> None:
    """Renew the locks in a forked child, which lacks the thread that may hold one."""
    for items in list(_all_items):
        items._mutex = threading.Lock()


os.register_at_fork(after_in_child=_renew_mutexes)


def encode(item: object) -> bytes:
    """An item as bytes; any exception may say that it cannot be pickled."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(item)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles plain tensors as their own elements: PyTorch would take all of a large tensor's storage for one row."""

    def reducer_override(self, value: Any) -> Any:
        """How to pickle a value; NotImplemented leaves it to pickle's own way."""
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor or value.device.type != "cpu":
            return NotImplemented
        if value.layout is not torch.strided or value.requires_grad or value.is_quantized:
            return NotImplemented
        if value.is_conj() or value.is_neg():
            return NotImplemented
        elements = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return _tensor, (value.dtype, tuple(value.shape), elements)


def _tensor(dtype: Any, shape: Sequence[int], elements: bytes) -> Any:
    import torch  # the core imports without PyTorch

    if not elements:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(elements), dtype=dtype).reshape(shape)


class Fetch:
    """A call of the dataset that begins now."""

    def __init__(self) -> None:
        self.start_ns, self._awake_ns = _clocks()

    def end(self) -> None:
        """The dataset has answered; it was blocked while it waited for something else than a core."""
        self.end_ns, awake_ns = _clocks()
        self.blocked_ns = max(0, self.end_ns - self.start_ns - (awake_ns - self._awake_ns))


class DatasetReads:
    """The reads of one dataset of `length` items, in `WORDS` whole numbers of shared memory, 0 at first.

    It measures how fast a dataset is read, as its cache sees it in a dry run, for the memory axis of sensitivity.
    Reading is when the thread that fetches an item neither computes nor waits for a core: decoding belongs to the CPU
    axis. Items count when they are read for the first time.
    """

    def __init__(self, words: memoryview, length: int) -> None:
        self._words = words
        self._length = length
        self._counts: list[int] = []
        self._words[_OWNER] = self._words[_OWNER] or os.getpid()
        known_reads.add(self)

    def add(self, fetch: Fetch, sizes: Collection[int]) -> None:
        """Count a fetch that has ended, with the bytes of each item; others must not do so in the same moment."""
        words, begin_ns = self._words, max(fetch.start_ns, self._words[_UNTIL_NS])
        words[_ITEMS] += len(sizes)
        words[_BYTES] += sum(sizes)
        words[_FETCH_NS] += fetch.end_ns - fetch.start_ns
        words[_BLOCKED_NS] += fetch.blocked_ns
        words[_COVERED_NS] += max(0, fetch.end_ns - begin_ns)
        words[_UNTIL_NS] = max(fetch.end_ns, words[_UNTIL_NS])
        if os.getpid() != words[_OWNER]:
            words[_ELSEWHERE] = 1

    def iteration_ended(self) -> None:
        """Remember what was read by now."""
        self._counts.append(self._words[_ITEMS])

    @property
    def items(self) -> int:
        """How many items were read."""
        return int(self._words[_ITEMS])

    def figures(self) -> dict[str, Any] | None:
        """Return the figures for a dry run, None where too little was seen.

        These are "items" of the dataset, "item_bytes" as kept, "batch_items" that an iteration reads, "workers"
        (whether other processes fetch) and "bytes_per_s" of all fetchers together: bytes over the time in which any of
        them was fetching, as far as they were blocked then.
        """
        _, elsewhere, items, size, fetch_ns, blocked_ns, covered_ns, _ = self._words
        batch_items = per_iteration(self._counts)
        if not (batch_items and size) or blocked_ns < UNSEEN_SHARE * fetch_ns:
            return None
        read_s = covered_ns * blocked_ns / fetch_ns * 1e-9
        return {
            "items": self._length,
            "item_bytes": size / items,
            "batch_items": batch_items,
            "bytes_per_s": size / read_s,
            "workers": bool(elsewhere),
        }


known_reads: Final[weakref.WeakSet[DatasetReads]] = weakref.WeakSet()


def per_iteration(counts: Sequence[int]) -> float | None:
    """Items read in an iteration, from their number after each; None while too few were seen.

    Workers fill their queues before the first iteration ends, and at the end of a small dataset nothing is new. So the
    second half of the iterations counts, up to the last that read something new.
    """
    last = counts.index(counts[-1]) if counts else 0
    first = last // 2
    return (counts[last] - counts[first]) / (last - first) if last > first else None


def _clocks() -> tuple[int, int]:
    """Return this moment, and how long this thread has computed, or waited for a core where the kernel tells, by then.

    If the thread loses its core between the readings, they belong to different moments, and all are made again.
    """
    waited_ns, before_ns = _waited_ns(), -1
    while waited_ns != before_ns:
        now_ns, computed_ns, before_ns = time.monotonic_ns(), time.thread_time_ns(), waited_ns
        waited_ns = _waited_ns()
    return now_ns, computed_ns + waited_ns


def _waited_ns() -> int:
    try:
        return int(_WAITS.read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


SPARE: Final = 0.1
"""Share of the job's memory that stays free for what its processes need later."""

LOOKS: Final = 32
"""While it fills, the cache looks so often at what the processes need."""


def left_bytes(given_bytes: int, root: int, others_bytes: int) -> int:
    """Return the bytes that a cache may take now of the memory given.

    The memory of process `root` and its descendants is needed, and what other caches of the process hold.
    """
    needed = sum(map(_own_bytes, (root, *descendants_of(root)))) + others_bytes
    return max(0, int(given_bytes * (1 - SPARE)) - needed)


def memory_given(environment: Mapping[str, str]) -> int:
    """Return the bytes of the job's memory on this node for each of its ranks there, 0 where Slurm does not say it.

    Each rank of the job on this node has a cache of its own. A memory of 0 means the node's, whose share of this job
    is unknown.
    """

    def number(name: str) -> int:
        """The whole number that a value begins with, as in "2(x3)"; 0 where there is none."""
        match = re.match(r"\s*(\d+)", environment.get(name, ""))
        return int(match[1]) if match else 0

    given_mib = (
        number("SLURM_MEM_PER_NODE")
        or number("SLURM_MEM_PER_CPU") * number("SLURM_CPUS_ON_NODE")
        or number("SLURM_MEM_PER_GPU") * number("SLURM_GPUS_ON_NODE")
    )
    counts = map(number, ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    ranks = next(filter(None, counts), 1)
    return given_mib * MIB // ranks


def _own_bytes(pid: int) -> int:
    """Return the memory of a process that is not a file's; shared memory is divided where the kernel tells."""
    for name, key in (("smaps_rollup", "Pss_Anon:"), ("status", "RssAnon:")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(f"/proc/{pid}/{name}").read_text().splitlines():
                if line.startswith(key):
                    return int(line.split()[1]) * 1024
    return 0
