"""A training script that trains in blocks, when it is told to.

    python run_overhead_job.py CORE COMMANDS ANSWERS     with two named pipes

It reads a line with a batch size and a number of iterations from COMMANDS, trains so much, and writes the seconds that
an iteration took, on the clock and of the CPU, to ANSWERS. The end of COMMANDS is its own.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

IMAGE = (3, 32, 32)


def main() -> None:
    """Train block by block."""
    core, commands, answers = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(16 * 28 * 28, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with commands.open() as told, answers.open("w", buffering=1) as told_back:
        for line in told:
            batch_size, iterations = map(int, line.split())
            count = batch_size * iterations
            samples = TensorDataset(torch.randn(count, *IMAGE), torch.randint(0, 10, (count,)))
            loader = DataLoader(samples, batch_size=batch_size, shuffle=True)
            begin_s, cpu_begin_s = time.perf_counter(), time.process_time()
            for images, labels in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
            wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_begin_s
            told_back.write(f"{wall_s / iterations} {cpu_s / iterations}\n")


main()
