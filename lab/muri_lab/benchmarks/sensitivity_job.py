"""A real training script whose appetite is known: items that wait or compute, or come through a throttle.

    python benchmarks/sensitivity_job.py waits    --workers 4 --item-ms 10
    python benchmarks/sensitivity_job.py burns    --workers 2 --item-ms 3
    python benchmarks/sensitivity_job.py throttled --mib-per-s 16 --cached 0.5 --prefetch 1

`waits`: preparing an item takes a fixed time of waiting, as with a decoder elsewhere, so that throughput follows the
number of workers beyond the cores of this machine. `burns`: it takes CPU time instead. `throttled`: items are read
from a file past the page cache, at a limited rate, and a share of them is kept by `muri.cache`.
"""

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

import muri
from muri.units import MIB

FEATURES, CLASSES = 64, 10
ITEM_BYTES = 64 * 1024
ENDLESS = 1_000_000


class Prepared(Dataset):
    """Items that take a fixed time to prepare: waiting, or computing."""

    def __init__(self, item_s: float, *, burns: bool) -> None:
        self._item_s = item_s
        self._burns = burns

    def __len__(self) -> int:
        """More than any run asks for."""
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """An item, after its time."""
        if self._burns:
            end_s = time.thread_time() + self._item_s
            while time.thread_time() < end_s:
                pass
        else:
            time.sleep(self._item_s)
        return torch.full((FEATURES,), float(index % CLASSES)), index % CLASSES


class Throttle:
    """Lets bytes through at a fixed rate; it compensates for sleeps that last too long, but not for idle time."""

    LATE_S = 0.001

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def take(self, count: int, since_s: float) -> None:
        """Return no sooner than so many bytes may have passed that were asked for at `since_s`."""
        self._free_at_s = max(self._free_at_s, since_s - self.LATE_S) + count / self._bytes_per_s
        time.sleep(max(0.0, self._free_at_s - time.perf_counter()))


class Throttled(Dataset):
    """Items of a file, read directly from storage and no faster than a token bucket lets them through."""

    def __init__(self, path: Path, bytes_per_s: float) -> None:
        self._count = path.stat().st_size // ITEM_BYTES
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._throttle = Throttle(bytes_per_s)

    def __len__(self) -> int:
        """How many the file holds."""
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """An item, past the page cache and through the throttle."""
        begin_s = time.perf_counter()
        with mmap.mmap(-1, ITEM_BYTES) as buffer:
            count = os.preadv(self._file, [buffer], index * ITEM_BYTES)
            data = torch.frombuffer(bytearray(buffer), dtype=torch.uint8)
        self._throttle.take(count, begin_s)
        return data, index % CLASSES


class EndlessEpochs(Sampler):
    """Every item once per epoch in a new random order, one epoch right after the other."""

    def __init__(self, items: int) -> None:
        self._items = items

    def __iter__(self) -> Iterator[int]:
        """Positions without end."""
        while True:
            yield from torch.randperm(self._items).tolist()


def dataset_file(items: int) -> Path:
    """A file of random items; where files are temporary there may be no O_DIRECT, so it lies beside this one."""
    with tempfile.NamedTemporaryFile(dir=Path(__file__).parent, prefix=".dataset-", delete=False) as file:
        for _ in range(items):
            file.write(os.urandom(ITEM_BYTES))
    return Path(file.name)


def throttled(options: argparse.Namespace) -> Dataset:
    """The throttled dataset, a share of it kept."""
    path = dataset_file(options.items)
    dataset = Throttled(path, options.mib_per_s * MIB)
    path.unlink()
    if not options.cached:
        return dataset
    probe = muri.cache([dataset[0]], gib=1)
    before = probe.used_gib
    probe[0]
    table_gib = muri.cache(range(options.items), gib=1).used_gib
    return muri.cache(dataset, gib=table_gib + options.cached * options.items * (probe.used_gib - before) * 1.0001)


def train(batches: Iterator[tuple[torch.Tensor, torch.Tensor]], step_s: float) -> None:
    """Real steps of a small network, each filled up with waiting to a fixed time."""
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, labels in batches:
        with muri.stage("propagate"):
            end_s = time.perf_counter() + step_s
            loss = nn.functional.cross_entropy(model(inputs[:, :FEATURES].float()), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(max(0.0, end_s - time.perf_counter()))


def main() -> None:
    """Train until ended by a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("waits", "burns", "throttled"))
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--item-ms", type=float, default=10.0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--mib-per-s", type=float, default=16.0)
    parser.add_argument("--items", type=int, default=256)
    parser.add_argument("--prefetch", type=int, default=0)
    parser.add_argument("--cached", type=float, default=0.0, help="share of the dataset that is kept")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if options.kind == "throttled":
        dataset = throttled(options)
    else:
        dataset = Prepared(options.item_ms / 1000, burns=options.kind == "burns")
    sampler = EndlessEpochs(options.items) if options.kind == "throttled" else None
    loader = DataLoader(dataset, options.batch_size, sampler=sampler, num_workers=options.workers)
    train(muri.batches(loader, prefetch=options.prefetch), options.step_ms / 1000)


if __name__ == "__main__":
    main()
