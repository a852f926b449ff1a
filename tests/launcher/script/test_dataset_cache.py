"""`muri.cache`: equal items, a fixed hit rate in every epoch, shared by a loader's workers, within its limit."""

import copy
import gc
import multiprocessing
import operator
import os
import pickle
import signal
import threading
import time
from collections import Counter
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from polling import DEADLINE_S
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import muri
from muri.launcher.script import dataset_cache
from muri.launcher.script.dataset_cache import GIB, CacheError, SharedItems, cache, encode
from muri.profiler.dryrun.messages import FULL_MEMORY_VARIABLE

ITEM_FLOATS = 1024


class Samples(Dataset):
    """Notes each read as a byte in a file, from whatever process."""

    def __init__(self, count, log):
        self.count, self.log, self.classes = count, log, ["cat", "dog"]

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if not -self.count <= index < self.count:
            raise IndexError(index)
        with self.log.open("ab") as stream:
            stream.write(bytes([index % self.count]))
        return torch.full((ITEM_FLOATS,), float(index)), index % 10

    def reads(self):
        found = Counter(self.log.read_bytes()) if self.log.exists() else Counter()
        self.log.unlink(missing_ok=True)
        return found


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.fixture
def samples(tmp_path):
    return Samples(40, tmp_path / "reads")


def item_gib(item):
    return len(encode(item)) / GIB


def room_for(items, sample):
    return items * item_gib(sample) + SharedItems.table_bytes(40) / GIB + 10 / GIB


@pytest.mark.parametrize(
    ("workers", "persistent"), [(0, False), (2, False), pytest.param(2, True, marks=pytest.mark.thorough)]
)
def test_every_epoch_after_the_first_hits_for_the_same_items(samples, workers, persistent):
    sample = samples[0]
    samples.reads()
    cached = muri.cache(samples, gib=room_for(10, sample))
    loader = DataLoader(
        cached, batch_size=4, shuffle=True, num_workers=workers, persistent_workers=persistent,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    missed = []
    for _epoch in range(4):
        seen = {}
        for inputs, labels in loader:
            for row, label in zip(inputs, labels.tolist(), strict=True):
                seen[int(row[0])] = (row, label)
        assert sorted(seen) == list(range(40))
        assert all(torch.equal(row, torch.full((ITEM_FLOATS,), float(n))) for n, (row, _) in seen.items())
        assert all(label == n % 10 for n, (_, label) in seen.items())
        missed.append(set(samples.reads()))
    assert missed[0] == set(range(40))
    assert missed[1] == missed[2] == missed[3]
    assert len(missed[1]) == 30
    assert (cached.kept, cached.hit_rate) == (10, 0.25)
    assert cached.used_gib <= cached.gib


def test_a_single_kept_item_is_not_looked_up_as_a_batch(samples, monkeypatch):
    cached = cache(samples, gib=1)
    first = cached[0]
    monkeypatch.setattr(dataset_cache.CachedDataset, "_items_of", None)
    assert torch.equal(cached[0][0], first[0])


@pytest.mark.parametrize("gib", [0.1, None])
def test_a_spawned_worker_shares_it_too(gib, monkeypatch):
    with monkeypatch.context() as job:
        job.setenv("SLURM_MEM_PER_NODE", "65536")
        cached = cache([b"zero", b"one"], gib=gib)  # what the job was given is not asked for in the worker again
    worker = multiprocessing.get_context("spawn").Process(target=operator.getitem, args=(cached, 1))
    worker.start()
    worker.join(DEADLINE_S)
    assert (worker.exitcode, cached.kept) == (0, 1)
    cached.dataset[1] = b"not read any more"
    assert cached[1] == b"one"


class Known(list):
    """A dataset that knows its cache."""

    def __init__(self, items):
        super().__init__(items)
        self.cached = cache(self, gib=0.1)


COPIES = (copy.copy, copy.deepcopy, lambda cached: pickle.loads(pickle.dumps(cached)))


@pytest.mark.parametrize("copied_by", COPIES, ids=["copy", "deepcopy", "pickle"])
def test_a_copy_begins_with_an_empty_one_and_keeps_what_the_script_has_set(copied_by):
    known = Known([b"zero", b"one"])
    known.cached.epoch = 7
    assert known.cached[1] == b"one"
    copied = copied_by(known.cached)
    assert (copied.kept, copied.gib, copied[1], copied.kept) == (0, known.cached.gib, b"one", 1)
    assert (len(copied), copied.epoch) == (2, 7)
    assert copied.dataset.cached is (known.cached if copied_by is copy.copy else copied)
    assert known.cached.kept == 1


def test_where_a_copy_is_loaded_the_job_says_what_it_may_keep(monkeypatch, caplog):
    for name in ("MEM_PER_CPU", "MEM_PER_GPU", "STEP_TASKS_PER_NODE", "TASKS_PER_NODE"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in (("SLURM_JOB_ID", "7"), (FULL_MEMORY_VARIABLE, "7"), ("SLURM_MEM_PER_NODE", "4096")):
        monkeypatch.setenv(name, value)
    stored = pickle.dumps(cache(list(range(40))))
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "8192")
    caplog.clear()
    loaded = pickle.loads(stored)
    assert (loaded[39], loaded.kept) == (39, 1), "all items, unlike in the trial of job 7"
    assert 4 < loaded.gib < 8
    monkeypatch.delenv("SLURM_MEM_PER_NODE")
    loaded = pickle.loads(stored)
    assert (loaded[39], loaded.kept, loaded.gib) == (39, 0, 0.0)
    assert caplog.text == "", "once is enough to say"


def test_what_a_script_changes_in_an_item_is_not_seen_again(samples):
    cached = cache(samples, gib=0.1)
    for _ in range(3):
        inputs, _label = cached[3]
        assert inputs[0] == 3.0
        inputs.zero_()


def test_other_attributes_and_strange_positions_are_the_datasets(samples):
    cached = cache(samples, gib=0.1)
    assert len(cached) == 40
    assert cached.classes == ["cat", "dog"]
    with pytest.raises(AttributeError):
        _ = cached.no_such_thing
    with pytest.raises(IndexError):
        cached[40]
    assert cached[np.int64(5)][1] == cached[torch.tensor(5)][1] == 5
    assert cached[-1][0][0] == -1.0  # as the dataset answers it
    assert sum(1 for _ in cached) == 40


def test_batched_fetches_read_only_what_is_missing(tmp_path):
    class Batched(Samples):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    samples = Batched(40, tmp_path / "reads")
    cached = cache(samples, gib=0.1)
    wanted = [3, 1, 2]
    assert [item[1] for item in cached.__getitems__([3, 1])] == [3, 1]
    samples.reads()
    assert [item[1] for item in cached.__getitems__(wanted)] == wanted
    assert samples.reads() == Counter({2: 1})
    assert cache(Samples(4, tmp_path / "other"), gib=0.1).__getitems__ is None


def test_an_item_that_cannot_be_pickled_is_read_every_time(caplog):
    class Odd(Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return (lambda: index) if index else index

    cached = cache(Odd(), gib=0.1)
    assert cached[1]() == cached[1]() == 1
    assert cached[0] == cached[0] == 0
    assert cached.kept == 1
    assert sum("cannot be kept" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("dataset", "gib", "text"),
    [
        ([1, 2], 0, "gib is 0"),
        ([1, 2], float("nan"), "gib is nan"),
        ([1, 2], "4", "gib is '4'"),
        ([1] * 10_000, 1e-5, "the table of 10000 items alone"),
        (iter([1]), 1, "no __len__ and no __getitem__"),
        (Samples, 1, "the class Samples, not an object"),
        (Stream(), 1, "iterable dataset"),
    ],
)
def test_nonsense_is_refused(dataset, gib, text):
    with pytest.raises(CacheError, match=text):
        cache(dataset, gib=gib)


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3))
def test_items_come_back_equal(dtype, shape):
    tensor = (torch.rand(shape) * 100).to(dtype)
    found, *rest = pickle.loads(encode({"x": [tensor, None, "text", b"bytes", 7]}))["x"]
    assert rest == [None, "text", b"bytes", 7]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)


def test_views_take_only_their_own_size_and_others_keep_their_kind():
    table = torch.randn(1000, 64)
    assert len(encode(TensorDataset(table)[5])) < 1000
    assert len(encode(np.zeros((1000, 64))[3])) < 1000
    transposed = torch.arange(6).reshape(2, 3).T
    assert torch.equal(pickle.loads(encode(transposed)), transposed)
    leaf = torch.ones(3, requires_grad=True)
    assert pickle.loads(encode(leaf)).requires_grad
    assert type(pickle.loads(encode(torch.nn.Parameter(leaf)))) is torch.nn.Parameter


def test_threads_and_processes_writing_at_once_keep_every_item_whole(monkeypatch):
    places, context, write = 60, multiprocessing.get_context("fork"), dataset_cache._write
    shared = SharedItems(places, SharedItems.table_bytes(places) + places * 100)
    begin = context.Barrier(6, timeout=DEADLINE_S)
    # Each one meets the others in the midst of a write.
    monkeypatch.setattr(dataset_cache, "_write", lambda *arguments: (time.sleep(0.001), write(*arguments)))

    def fill():
        begin.wait()
        for place in range(places):
            shared.put(place, bytes([place + 1]) * 100)

    writers = [context.Process(target=fill) for _ in range(3)] + [threading.Thread(target=fill) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(DEADLINE_S)
    assert [shared.get(place) for place in range(places)] == [bytes([n + 1]) * 100 for n in range(places)]
    assert (shared.kept, shared.used_bytes) == (places, SharedItems.table_bytes(places) + places * 100)


def test_a_writer_killed_while_it_holds_the_lock_blocks_nobody():
    shared = SharedItems(2, 10_000)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with shared._locked():
            os.write(writer, b"x")
            signal.pause()
    assert os.read(reader, 1) == b"x"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    shared.put(0, b"kept")
    assert shared.get(0) == b"kept"
    os.close(reader)
    os.close(writer)


def test_what_an_interrupted_writer_did_not_keep_is_kept_by_the_next(monkeypatch):
    shared = SharedItems(1, GIB)
    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr(os, "pwrite", Mock(side_effect=KeyboardInterrupt))
        shared.put(0, b"lost")
    assert (shared.undecided(0), shared.get(0), shared.kept) == (True, None, 0)
    shared.put(0, b"kept")
    assert (shared.get(0), shared.kept) == (b"kept", 1)


def test_memory_goes_with_the_dataset(samples):
    process = psutil.Process()
    gc.collect()  # what earlier tests have left
    before = process.num_fds()
    held = [cache(samples, gib=0.1) for _ in range(5)]
    assert process.num_fds() > before
    del held
    gc.collect()
    assert process.num_fds() == before
