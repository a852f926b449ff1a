"""A dry run measures the dataset in `muri.cache`: its size, reads of an iteration, and the speed of storage."""

import time
from array import array
from types import SimpleNamespace

import pytest
from launcher_harness import Launcher
from torch.utils.data import DataLoader

from muri.clock import MIB
from muri.launcher.script import dataset_cache
from muri.launcher.script.dataset_cache import WORDS, DatasetReads, Fetch, cache, encode, per_iteration
from muri.profiler.dryrun.messages import DRY_RUN_VARIABLE, FULL_MEMORY_VARIABLE, READS

MS = 1_000_000


class Slow:
    """Storage of one item in two milliseconds, for each reader."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        time.sleep(0.002)
        return bytes([index]) * 1000


class Batched(Slow):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def counted(*fetches):
    """Return the report after fetches of (start, end, blocked) milliseconds, one item of 1 MiB in each."""
    reads = DatasetReads(memoryview(array("q", [0] * WORDS)), 50)
    for start, end, blocked in fetches:
        reads.iteration_ended()
        reads.add(SimpleNamespace(start_ns=start * MS, end_ns=end * MS, blocked_ns=blocked * MS), [MIB])
    reads.iteration_ended()
    return reads.figures()


def test_the_rate_is_that_of_all_fetchers_while_they_are_blocked():
    alone = counted((1, 11, 10), (11, 21, 10), (31, 41, 10))
    rate = pytest.approx(100 * MIB)
    assert alone == {"items": 50, "item_bytes": MIB, "batch_items": 1, "bytes_per_s": rate, "workers": False}
    assert counted((1, 11, 10), (1, 11, 10))["bytes_per_s"] == pytest.approx(200 * MIB)  # beside each other
    assert counted((1, 11, 10), (6, 16, 10), (11, 21, 10))["bytes_per_s"] == pytest.approx(150 * MIB)
    assert counted((1, 11, 5), (11, 21, 5))["bytes_per_s"] == pytest.approx(200 * MIB)  # the rest was decoding


def test_nothing_is_told_where_too_little_was_seen():
    assert counted() is None
    assert counted((1, 11, 0), (11, 21, 0)) is None  # it came from memory


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([], None),
        ([0, 0, 0], None),
        ([96], None),
        ([8, 16, 24, 32, 40], 8),
        ([64, 72, 80, 88, 96], 8),  # workers were eight batches ahead
        ([8, 16, 24, 32, 32, 32, 32], 8),  # all was read
    ],
)
def test_items_of_an_iteration(counts, expected):
    assert per_iteration(counts) == expected


class BusyMachine:
    """Each reading of a clock takes a microsecond; one of them also takes the thread's core away for a while."""

    def __init__(self, loses_core_at):
        self.now_ns = self.computed_ns = self.waited_ns = self.readings = 0
        self._loses_core_at = loses_core_at

    def sleep(self, ns):
        self.now_ns += ns

    def read(self, clock):
        told = getattr(self, clock)
        self.now_ns += 1000
        self.computed_ns += 1000
        self.readings += 1
        if self.readings == self._loses_core_at:
            self.now_ns += 46 * MS
            self.waited_ns += 46 * MS
        return told


@pytest.mark.parametrize("loses_core_at", range(1, 9))
def test_whenever_a_thread_loses_its_core_that_is_no_reading(monkeypatch, loses_core_at):
    machine = BusyMachine(loses_core_at)
    monkeypatch.setattr(dataset_cache, "time", SimpleNamespace(
        monotonic_ns=lambda: machine.read("now_ns"), thread_time_ns=lambda: machine.read("computed_ns")
    ))  # fmt: skip
    monkeypatch.setattr(dataset_cache, "_waited_ns", lambda: machine.read("waited_ns"))
    fetch = Fetch()
    machine.sleep(50 * MS)
    fetch.end()
    assert fetch.blocked_ns == pytest.approx(50 * MS, abs=5000)


@pytest.mark.parametrize(
    ("kind", "workers", "gib"), [(Slow, 0, None), (Batched, 0, 0.1), (Slow, 2, 0.1), (Batched, 2, None)]
)
def test_every_item_counts_once_whoever_reads_it(monkeypatch, kind, workers, gib):
    monkeypatch.setenv(DRY_RUN_VARIABLE, "auto")
    for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU"):
        monkeypatch.delenv(name, raising=False)  # without gib nothing is kept
    cached = cache(kind(), gib=gib)
    reads = cached._items._reads
    for _epoch in range(2):
        for _batch in DataLoader(cached, batch_size=4, num_workers=workers, collate_fn=list):
            reads.iteration_ended()
    told = reads.figures()
    assert (reads.items, told["items"], told["workers"]) == (100, 100, workers > 0)
    assert told["item_bytes"] == len(encode(bytes(1000)))
    assert told["batch_items"] == pytest.approx(4, rel=0.5)
    assert told["bytes_per_s"] <= max(1, workers) * told["item_bytes"] / 0.002 * 1.1


def test_outside_of_a_dry_run_nothing_is_measured(monkeypatch):
    monkeypatch.delenv(DRY_RUN_VARIABLE, raising=False)
    cached = cache(Slow(), gib=0.1)
    assert cached[3] == bytes([3]) * 1000
    assert (cached._items._reads.items, cached.kept) == (0, 1)


def test_as_if_all_were_in_memory_a_few_items_are_read_again_and_again(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv(FULL_MEMORY_VARIABLE, "17")
    cached = cache(Batched(), gib=0.1)
    assert {cached[index][0] for index in range(100)} == set(range(32))
    assert [item[0] for item in cached.__getitems__([1, 33, -1])] == [1, 1, 99 % 32]
    assert cached.kept == 0
    monkeypatch.setenv("SLURM_JOB_ID", "18")  # submitted by such a run
    assert {cache(Batched(), gib=0.1)[index][0] for index in range(100)} == set(range(100))


SCRIPT = """
    import time
    import muri
    class Files:
        def __len__(self):
            return 1000
        def __getitem__(self, index):
            time.sleep(0.002)
            return bytes(1 << 16)
    data = muri.cache(Files(), gib=0.5)
    unused = muri.cache([1, 2], gib=0.1)
    def batches():
        for start in range(0, 1000, 4):
            yield [data[index] for index in range(start, start + 4)]
    for batch in muri.batches(batches(), prefetch=0):
        with muri.stage("propagate"):
            time.sleep(0.002)
"""


def test_a_dry_run_tells_the_dataset_of_which_most_was_read(launcher: Launcher) -> None:
    _code, result = launcher.dry_run("auto:12:20", launcher.script(SCRIPT))
    told = result[READS]
    assert (told["items"], told["batch_items"], told["workers"]) == (1000, 4, False)
    assert told["item_bytes"] == len(encode(bytes(1 << 16)))
    assert 0 < told["bytes_per_s"] <= told["item_bytes"] / 0.002 * 1.1
