"""Interleaving measured: throughput of four members with different bottlenecks, cost of a switch, and a soak."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from muri_lab.benchmarks import interleaving_overhead, interleaving_soak
from muri_lab.benchmarks import interleaving_synthetic as synthetic
from muri_lab.benchmarks.bars import Bar, finish, tell
from muri_lab.benchmarks.runtime_process import BenchmarkError

ROOT = Path(__file__).parents[3]
RESULT = Path(__file__).parent / "results" / "interleaving.json"
SOAK_STARTS = 2000
AUTO_S = 600


def equal() -> dict[str, Any]:
    """Synthetic stages, equal iterations."""
    return {"set": synthetic.measure(synthetic.equal_iterations(), synthetic.WAYS, tell)}


def unequal(*seeds: int) -> dict[str, Any]:
    """Synthetic stages, iterations of 20 to 1,000 ms."""
    return {
        f"seed {seed}": synthetic.measure(synthetic.unequal_iterations(seed), synthetic.WAYS, tell) for seed in seeds
    }


def overhead() -> dict[str, Any]:
    """Cost of a switch."""
    tell("overhead")
    return interleaving_overhead.measure()


def soak() -> dict[str, Any]:
    """Thousands of scripts in one runtime."""
    return interleaving_soak.measure(SOAK_STARTS, tell)


def real() -> dict[str, Any]:
    """Real PyTorch jobs on the CPU, once in each way."""
    tell("real PyTorch jobs: about four minutes")
    return _real("--seconds", "6", "--rounds", "1")


def auto_long() -> dict[str, Any]:
    """Real PyTorch jobs under `auto` for ten minutes, from their first iterations on, beside the single disciplines."""
    tell("real PyTorch jobs for ten minutes: about 20 minutes")
    ways = ("plain-passive", "processes:fair", "processes:plain")
    return _real("--seconds", "40", "--rounds", "1", "--auto-s", str(AUTO_S), "--ways", *ways)


def _real(*options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "muri_lab.benchmarks.interleaving_real", "--json", *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)["real_pytorch_cpu"]
    return found


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "equal": equal,
    "unequal": partial(unequal, 1),
    "unequal-more": partial(unequal, 2, 3),
    "overhead": overhead,
    "soak": soak,
    "real": real,
    "auto-long": auto_long,
}
USUAL = ("equal", "unequal", "overhead", "real")
"""The cases that are measured unless others are named: in less than ten minutes."""


def bars(cases: Mapping[str, dict[str, Any]]) -> list[Bar]:
    """What the measured cases have to reach."""
    found = []
    if "equal" in cases:
        for way in synthetic.GOOD_WAYS:
            total = cases["equal"]["set"][way]["total"]
            found.append(Bar("equal", f"total of 4, {way}", total, "≥ 3.8", total >= 3.8))
    for name in ("unequal", "unequal-more"):
        if name in cases:
            found += _unequal_bars(name, cases[name])
    if "overhead" in cases:
        found += _overhead_bars(cases["overhead"])
    if "soak" in cases:
        soaked = cases["soak"]
        for what in ("threads", "files"):
            grown = soaked[what][1] - soaked[what][0]
            found.append(Bar("soak", f"more {what}", grown, "≤ 0", grown <= 0))
        found.append(Bar("soak", "memory growth", soaked["memory_growth"], "≤ 0.05", soaked["memory_growth"] <= 0.05))
    return found + [bar for name in ("real", "auto-long") for bar in _real_bars(name, cases.get(name, {}))]


def _unequal_bars(case: str, sets: Mapping[str, dict[str, Any]]) -> list[Bar]:
    found = []
    for way in synthetic.GOOD_WAYS:
        ratio = round(sum(figures[way]["ratio"] for figures in sets.values()) / len(sets), 3)
        found.append(Bar(case, f"{way} / LP bound, mean of {len(sets)} sets", ratio, "≥ 0.85", ratio >= 0.85))
    for name, figures in sets.items():
        gain = round(figures["fair"]["total"] - figures["lockstep"]["total"], 3)
        found.append(Bar(case, f"{name}: fair − lockstep", gain, "> 0", gain > 0))
    return found


def _overhead_bars(figures: Mapping[str, dict[str, float]]) -> list[Bar]:
    one, between = figures["hand-over in one process"], figures["hand-over between processes"]
    return [
        Bar("overhead", "in one process, p50 µs", one["p50_us"], "< 50", one["p50_us"] < 50),
        Bar("overhead", "in one process, p99 µs", one["p99_us"], "< 500", one["p99_us"] < 500),
        Bar("overhead", "between processes, p50 µs", between["p50_us"], "< 200", between["p50_us"] < 200),
    ]


def _real_bars(case: str, figures: Mapping[str, Any]) -> list[Bar]:
    found = []
    for name, what, least in (
        ("ratio", "best way / best without Muri", 1.1),
        ("auto_ratio", "auto for ten minutes / best single discipline", 0.97),
    ):
        value = figures.get(name)
        if value is not None:
            found.append(Bar(case, what, round(value, 3), f"≥ {least}", value >= least))
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--case", "chosen", multiple=True, type=click.Choice(list(CASES)), help="Only this one; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print what was measured as JSON.")
@click.option("--write/--no-write", "stored", default=True, help="Keep it in benchmarks/results/interleaving.json.")
def main(chosen: tuple[str, ...], as_json: bool, stored: bool) -> None:
    """Measure how well members share a node; exit with 1 if a figure misses its bar.

    \b
    Examples:
      python -m muri_lab.benchmarks.interleaving                    under ten minutes
      python -m muri_lab.benchmarks.interleaving --case auto-long   about 20 minutes
      python -m muri_lab.benchmarks.interleaving --case overhead    seconds
      python -m muri_lab.benchmarks.interleaving --case equal --case unequal --json

    Leave the machine alone meanwhile: hand-overs take microseconds.
    """
    try:
        cases = {name: CASES[name]() for name in chosen or USUAL}
    except BenchmarkError as error:
        raise click.ClickException(str(error)) from error
    finish(RESULT, cases, bars(cases), stored=stored, as_json=as_json)


if __name__ == "__main__":
    main()
