"""Traces, runs and summaries for the tests of sweeps, reports and experiments."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from engine_builders import CPU, GPU, NETWORK, STORAGE, job

from muri.simulator.metrics import TraceSummary, summarize
from muri.simulator.model import Cluster, Run, Settings, Trace
from muri.simulator.run import run_one
from muri.simulator.traces.schema import write_trace

KINDS = (STORAGE, CPU, GPU, NETWORK)
CLUSTER = Cluster(2, 4)
TWO_BY_FOUR = ("--nodes", "2", "--gpus-per-node", "4")


def small_trace(name: str = "small", jobs: int = 40, seed: int = 0) -> Trace:
    """Jobs of four kinds that arrive faster than two nodes of four GPUs can serve them alone."""
    random = Random(seed)
    made = [
        job(
            number,
            float(number * 40),
            float(random.randint(100, 2000)),
            KINDS[random.randrange(len(KINDS))],
            gpu_count=random.choice((1, 1, 2, 4)),
        )
        for number in range(jobs)
    ]
    return Trace(name, tuple(made))


def trace_file(folder: Path, name: str = "small", **how: Any) -> Path:
    """The same as a file."""
    path = folder / f"{name}.csv"
    write_trace(small_trace(name, **how), path)
    return path


def runs(policies: Sequence[str] = ("fifo", "muri-s"), traces: Sequence[Trace] = (), **how: Any) -> list[Run]:
    """Policies on traces, with the timeline."""
    return [
        Run(name, trace, name, CLUSTER, Settings(**how), with_spans=True)
        for trace in traces or [small_trace()]
        for name in policies
    ]


def summary(policies: Sequence[str] = ("fifo", "muri-s")) -> TraceSummary:
    """Policies on the small trace, carried out."""
    return summarize([run_one(run) for run in runs(policies)])[0]
