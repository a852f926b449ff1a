"""Sensitivity measured: bisection beside full sweeps on real jobs, and the computed memory axis beside a measured one.

The jobs are real training scripts in processes of their own (benchmarks/sensitivity_job.py). What their throughput
waits for is known: preparing items is waiting (`waits`), so that it follows the number of loader workers, which is
the number of granted CPUs, beyond the cores of this machine. Affinity itself is shown apart, with as many cores as
there are. The storage of the memory axis is a throttle in front of real reads.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from muri.profiler.dryrun.runner import Limits, measure_script
from muri.profiler.sensitivity.bisection import CpuSensitivity, bisect, sweep
from muri.profiler.sensitivity.memory_axis import Dataset, measure_bandwidth, measured_overlap, throughput
from muri.profiler.sensitivity.throughput import ScriptMeter, usable_cpus
from muri.units import MIB
from muri_lab.benchmarks.bars import Bar, keep, tell, verdict
from muri_lab.benchmarks.sensitivity_job import ITEM_BYTES, Throttled, dataset_file

RESULT = Path(__file__).parent / "results" / "sensitivity.json"
JOB = str(Path(__file__).with_name("sensitivity_job.py"))
STEADY_S = 1.5

WAITING = {
    "saturates in the middle": (10, ("--item-ms", "40", "--step-ms", "80")),
    "rises to the end": (8, ("--item-ms", "40", "--step-ms", "16")),
    "flat": (6, ("--item-ms", "4", "--step-ms", "80")),
}
"""Most CPUs, and the job's arguments: iterations long enough that what else runs on the machine hardly counts."""

ITEMS, BATCH, STEP_MS, MIB_PER_S = 256, 16, 80, 8.0
CACHED = (0.0, 0.25, 0.5, 0.75, 1.0)
EPOCH = ITEMS // BATCH


def waiting_job(max_cpus: int, arguments: tuple[str, ...]) -> dict[str, Any]:
    """One full sweep and one bisection of a job, each with measurements of its own."""
    command = [JOB, "waits", "--workers", "{cpus}", *arguments]

    def meter() -> ScriptMeter:
        return ScriptMeter(
            command, pinned=False, steady_s=STEADY_S, tell=lambda n, one: tell(f"  {n} {one.throughput:.1f}")
        )

    full, few = sweep(meter(), max_cpus), bisect(meter(), max_cpus)
    return {"max_cpus": max_cpus, "sweep": _figures(full), "bisection": _figures(few)}


def _figures(found: CpuSensitivity) -> dict[str, Any]:
    return {
        "saturating_cpus": found.saturating_cpus,
        "measurements": found.measurements,
        "points": [asdict(point) for point in found.points],
    }


def affinity() -> dict[str, Any]:
    """A job whose two loader workers burn CPU, kept on each number of cores that there is."""
    command = [JOB, "burns", "--workers", "2", "--item-ms", "5", "--step-ms", "2"]
    meter, found = ScriptMeter(command, pinned=True, steady_s=STEADY_S), {}
    for cpus in range(1, min(2, usable_cpus()) + 1):
        used, measured = meter.dry_run(cpus).detail.cpu_cores, meter(cpus)
        tell(f"  {cpus}: {measured.throughput:.1f}, {used} cores in use")
        found[str(cpus)] = {"throughput": round(measured.throughput, 2), "cores_in_use": used}
    return found


def memory_axis(prefetch: int) -> dict[str, Any]:
    """Throughput at several cache sizes, measured and computed from the run with everything in memory."""
    storage_mib_per_s = _throttled_bandwidth()
    measured, overlap = {}, 0.0
    for share in CACHED:
        result = measure_script(
            [JOB, "throttled", "--prefetch", str(prefetch), "--cached", str(share), "--items", str(ITEMS),
             "--batch-size", str(BATCH), "--step-ms", str(STEP_MS), "--mib-per-s", str(MIB_PER_S)],
            limits=Limits(iterations=EPOCH, fixed_warmup=EPOCH),
        )  # fmt: skip
        measured[share] = 1 / result.iteration_s
        if share == 0:
            overlap = measured_overlap(result.iteration_s, result.stage_s[0], (result.detail.busy_s or (0.0,))[0])
        tell(f"  {share:.0%} cached: {measured[share]:.2f}")
    item_mib = ITEM_BYTES / MIB
    dataset = Dataset(ITEMS * item_mib / 1024, BATCH * item_mib, storage_mib_per_s, overlap)
    rows = []
    for share in CACHED[:-1]:
        computed = throughput(dataset, measured[1.0], share * dataset.dataset_gib)
        rows.append({"cached": share, "measured": measured[share], "computed": computed,
                     "error": computed / measured[share] - 1})  # fmt: skip
    return {"storage_mib_per_s": storage_mib_per_s, "overlap": overlap, "all_cached": measured[1.0], "sizes": rows}


def _throttled_bandwidth() -> float:
    path = dataset_file(ITEMS // 2)
    dataset = Throttled(path, MIB_PER_S * MIB)
    path.unlink()
    begin_s = time.perf_counter()
    for index in range(len(dataset)):
        dataset[index]
    return len(dataset) * ITEM_BYTES / MIB / (time.perf_counter() - begin_s)


def disk() -> dict[str, Any]:
    """The bandwidth of this machine's own storage, read past the page cache."""
    path = dataset_file(2048)
    try:
        return asdict(measure_bandwidth([path]))
    finally:
        path.unlink()


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"cpus: {name}": (lambda job=job: waiting_job(*job)) for name, job in WAITING.items()},
    "affinity": affinity,
    "memory: the loop waits": lambda: memory_axis(prefetch=0),
    "memory: batches are prefetched": lambda: memory_axis(prefetch=1),
    "disk": disk,
}


def bars(cases: dict[str, dict[str, Any]]) -> list[Bar]:
    """What the measured cases have to reach."""
    found = []
    for name, figures in cases.items():
        if name.startswith("cpus"):
            few, full = figures["bisection"], figures["sweep"]
            off = abs(few["saturating_cpus"] - full["saturating_cpus"])
            share = few["measurements"] / full["measurements"]
            found.append(Bar(name, "cores off the sweep", off, "≤ 1", off <= 1))
            found.append(Bar(name, "measurements / sweep's", round(share, 2), "≤ 0.5", share <= 0.5))
        elif name.startswith("memory"):
            worst = round(max(abs(row["error"]) for row in figures["sizes"]), 4)
            found.append(Bar(name, "worst error", worst, "≤ 0.05", worst <= 0.05))
        elif name == "affinity":
            used = figures["1"]["cores_in_use"] or 0.0
            found.append(Bar(name, "cores in use on one", round(used, 2), "0.05 to 1.05", 0.05 <= used <= 1.05))
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--case", "chosen", multiple=True, type=click.Choice(list(CASES)), help="Only this one; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print what was measured as JSON.")
@click.option("--write/--no-write", "stored", default=True, help="Keep it in benchmarks/results/sensitivity.json.")
def main(chosen: tuple[str, ...], as_json: bool, stored: bool) -> None:
    """Measure how well the few measurements of a sensitivity do; exit with 1 if a figure misses its bar.

    \b
    Examples:
      python -m muri_lab.benchmarks.sensitivity                          all: five minutes
      python -m muri_lab.benchmarks.sensitivity --case disk --no-write
    """
    measured, missed = {}, 0
    for name in chosen or CASES:
        tell(name)
        measured[name] = CASES[name]()
        own = bars({name: measured[name]})
        if stored:
            keep(RESULT, {name: measured[name]}, own)
        missed |= verdict(own)
    if as_json:
        click.echo(json.dumps(measured, indent=1, ensure_ascii=False))
    sys.exit(missed)


if __name__ == "__main__":
    main()
