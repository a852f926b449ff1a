"""Rows of `scale.py`: simulations under the default model, a plan at every event, 8 nodes of 8 GPUs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from muri.simulator.metrics import metrics_of
from muri.simulator.model import Cluster, Settings, Trace
from muri.simulator.run import simulate
from muri.simulator.traces.generator import Recipe, generate
from muri.simulator.traces.read import read_trace
from muri_lab.benchmarks.machine import measured

TRACE_1: Final = Path(__file__).parents[4] / "shared" / "traces" / "muri_trace1.csv"
"""The Muri paper's first trace: 1,494 jobs. It is not ours to ship."""


def simulating(policy: str, trace_of: Callable[[], Trace]) -> Callable[[], dict[str, Any]]:
    """One simulation."""

    def row() -> dict[str, Any]:
        trace, cluster, how = trace_of(), Cluster(8, 8), Settings()
        simulate(Trace("beginning", trace.jobs[:20]), policy, cluster, how)  # what is imported late is imported now

        def work() -> dict[str, Any]:
            figures = metrics_of(simulate(trace, policy, cluster, how))
            return {"jobs": figures.jobs, "decisions": figures.decisions, "avg_jct_s": figures.avg_jct_s}

        return measured(work)

    return row


def on_trace_1(policy: str) -> Callable[[], dict[str, Any]]:
    """A simulation of the paper's trace; without the file, why there is none."""

    def row() -> dict[str, Any]:
        if not TRACE_1.exists():
            return {"skipped": f"there is no {TRACE_1.name} in {TRACE_1.parent}"}
        return simulating(policy, lambda: read_trace(TRACE_1))()

    return row


ROWS: Final[dict[str, tuple[Callable[[], dict[str, Any]], dict[str, float]]]] = {
    "simulate-trace-1-srtf": (on_trace_1("srtf"), {}),
    "simulate-trace-1-synergy": (on_trace_1("synergy"), {}),
    "simulate-trace-1-muri-s": (on_trace_1("muri-s"), {"cpu_s": 5.0}),
    "simulate-trace-1-muri-jct": (on_trace_1("muri-jct"), {"cpu_s": 15.0}),
    "simulate-20k-muri-jct": (simulating("muri-jct", lambda: generate(Recipe(20_000, 64))), {}),
    "simulate-100k-muri-jct": (simulating("muri-jct", lambda: generate(Recipe(100_000, 64))), {"cpu_s": 120.0}),
}
"""Each row, and the most that its figures may be."""
