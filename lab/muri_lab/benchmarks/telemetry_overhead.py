"""What telemetry costs: a real training loop with and without the sampler, in turns, in one process.

The sampler's thread shares the interpreter with the loop here, which is the worst case; a dry run
samples from outside. Three figures: wall-clock time of an iteration (noisy where others use the
machine), CPU time of the training thread per iteration, and the CPU time of the sampler itself.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from muri.profiler.resource_usage.sample import Usage
from muri.profiler.resource_usage.sampler import Sampler
from muri_lab.benchmarks.machine import describe_machine

RESULT = Path(__file__).parent / "results" / "telemetry_overhead.json"
SEED = 1
BLOCK_S = 3.0
BATCH_SIZE = 32
HELPERS = 16
"""Sleeping child processes of the second case: about as many as a job's DataLoader workers."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some iterations, with or without the sampler."""

    iteration_s: float
    cpu_s: float
    usage: Usage | None


def training_step() -> Callable[[], None]:
    """One iteration of a small CNN on random images, with SGD; about 10 to 20 ms on one core."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.LazyLinear(10),
    )  # fmt: skip
    images, labels = torch.randn(BATCH_SIZE, 3, 32, 32), torch.randint(0, 10, (BATCH_SIZE,))
    model(images)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def run_block(step: Callable[[], None], sampled: bool) -> Block:
    """Time one block."""
    sampler = Sampler(os.getpid()) if sampled else None
    if sampler is not None:
        sampler.start()
    began_s, cpu_began_s = time.perf_counter(), time.thread_time()
    iterations = 0
    while (wall_s := time.perf_counter() - began_s) < BLOCK_S:
        step()
        iterations += 1
    cpu_s = time.thread_time() - cpu_began_s
    usage = sampler.stop() if sampler is not None else None
    return Block(wall_s / iterations, cpu_s / iterations, usage)


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 4), "quartile_1": round(low, 4), "quartile_3": round(high, 4)}


def measure(step: Callable[[], None], seconds: float) -> dict[str, Any]:
    """Blocks in turns, as without, with, with, without: a drift of the machine falls on both."""
    pairs: list[tuple[Block, Block]] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        order = (False, True) if len(pairs) % 2 == 0 else (True, False)
        found = {sampled: run_block(step, sampled) for sampled in order}
        pairs.append((found[False], found[True]))
    usages = [block.usage for _, block in pairs if block.usage is not None]
    wall_s = BLOCK_S * len(pairs)
    return {
        "pairs_of_blocks": len(pairs),
        "seconds_per_block": BLOCK_S,
        "iteration_ms_without": round(statistics.median(block.iteration_s for block, _ in pairs) * 1e3, 3),
        "wall_ratio": spread([after.iteration_s / before.iteration_s for before, after in pairs]),
        "training_thread_cpu_ratio": spread([after.cpu_s / before.cpu_s for before, after in pairs]),
        "sampler_cpu_share_of_a_core": round(sum(usage.sampler_cpu_s for usage in usages) / wall_s, 5),
        "samples_per_s": round(sum(len(usage.samples) for usage in usages) / wall_s, 2),
    }


@click.command()
@click.option("--seconds", default=30.0, show_default=True, help="How long each of the two cases runs.")
@click.option("--write", is_flag=True, help=f"Write {RESULT.name}.")
def main(seconds: float, write: bool) -> None:
    """Measure what telemetry costs."""
    step = training_step()
    run_block(step, sampled=True)  # warm-up: imports, caches
    cases = {"one process": measure(step, seconds)}
    helpers = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(HELPERS)]
    try:
        cases[f"with {HELPERS} child processes"] = measure(step, seconds)
    finally:
        for helper in helpers:
            helper.communicate(b"\n")
    passed = all(case["sampler_cpu_share_of_a_core"] < 0.01 for case in cases.values())
    result = {
        "machine": describe_machine(),
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "cases": cases,
        "below_1_percent": passed,
    }
    text = json.dumps(result, indent=2)
    click.echo(text)
    if write:
        RESULT.write_text(text + "\n", encoding="utf-8")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
