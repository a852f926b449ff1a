"""A training script of the soak: python soak_job.py KIND SEED ITERATIONS LOG; losses follow from the arguments alone.

`stages` marks its stages and computes in Python; `torch` is found by the hooks; `workers` also has two workers that
load its samples. Each loss goes into the log with all digits, after the process id in its first line.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import muri

LOAD_S = 0.0005
FEATURES = 16
BATCH = 8


def ignore(_signum: int, _frame: object) -> None:
    """A handler, as of a script that saves a checkpoint on a signal."""


def stages(seed: int, iterations: int) -> Iterator[float]:
    """A linear model in plain Python."""
    generator = random.Random(seed)
    weights = [0.0] * FEATURES
    for _ in muri.batches(range(iterations)):
        with muri.stage("load"):
            time.sleep(LOAD_S)
        with muri.stage("preprocess"):
            sample = [generator.gauss(0, 1) for _ in range(FEATURES)]
        with muri.stage("propagate"):
            error = sum(w * x for w, x in zip(weights, sample, strict=True)) - sum(sample)
            weights = [w - 0.01 * error * x for w, x in zip(weights, sample, strict=True)]
        yield error * error


def torch_loop(seed: int, iterations: int, workers: int) -> Iterator[float]:
    """A small network on random samples, whose shuffling, dropout and augmentation all draw random numbers."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return iterations * BATCH

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.sin(torch.arange(FEATURES) * (index + 1.0)) + 0.1 * torch.randn(FEATURES)

    torch.manual_seed(seed)
    layers = (torch.nn.Linear(FEATURES, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for batch in DataLoader(Samples(), batch_size=BATCH, shuffle=True, num_workers=workers):
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


def main() -> None:
    """Train and write down the losses."""
    kind, seed, iterations, log = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, ignore)
    losses = stages(seed, iterations) if kind == "stages" else torch_loop(seed, iterations, 2 * (kind == "workers"))
    with log.open("w", buffering=1) as file:
        file.write(f"{os.getpid()}\n")
        for loss in losses:
            file.write(f"{loss.hex()}\n")


main()
