"""What the four jobs share: options, a log of iteration ends, and running until told to stop."""

import argparse
import mmap
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

import muri

Batch = TypeVar("Batch")

CLASSES = 10
SHARD_BYTES = 2 << 20


class DirectFile:
    """A file that is read from the disk itself, past the page cache (O_DIRECT)."""

    def __init__(self, path: Path, read_bytes: int = SHARD_BYTES) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._read_bytes = read_bytes
        self._count = os.fstat(self._file).st_size // read_bytes
        self._buffer = mmap.mmap(-1, read_bytes)  # aligned, as O_DIRECT asks for

    def read(self, place: int, size: int | None = None) -> bytes:
        """The first bytes at a place, counted in reads; all of the read when `size` is None."""
        os.preadv(self._file, [self._buffer], place % self._count * self._read_bytes)
        return self._buffer[:size]

    def read_random(self, generator: random.Random, size: int | None = None) -> bytes:
        """The first bytes at a random place."""
        return self.read(generator.randrange(self._count), size)


def job_options(description: str | None, **extra: str) -> argparse.Namespace:
    """Read the options that every job takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--log", type=Path, required=True, help="a line for each iteration: the monotonic clock")
    parser.add_argument("--stop", type=Path, required=True, help="the job ends when this file exists")
    parser.add_argument("--data", type=Path, required=True, help="directory on the disk to read from")
    parser.add_argument("--seed", type=int, default=0)
    for name, text in extra.items():
        parser.add_argument(f"--{name}", default="", help=text)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    return options


def train(options: argparse.Namespace, fetch: Callable[[], Batch], step: Callable[[Batch], None]) -> None:
    """Train on one batch while the next is fetched, as with a `DataLoader`; note the times; until told to stop."""

    def batches() -> Iterator[Batch]:
        while not options.stop.exists():
            yield fetch()

    with options.log.open("w", buffering=1) as log:
        for batch in muri.batches(batches(), prefetch=1):
            step(batch)
            log.write(f"{time.monotonic():.6f}\n")


def small_convnet() -> nn.Sequential:
    """The model of jobs whose bottleneck is elsewhere."""
    return nn.Sequential(
        nn.AvgPool2d(4), nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES),
    )  # fmt: skip


def optimize(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    """One optimizer step, as the stage `propagate`."""
    with muri.stage("propagate"):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
