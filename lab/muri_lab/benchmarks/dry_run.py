"""Dry runs measured: against loops with known stage times, and against each other on the example jobs."""

import itertools
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from muri.profiler.dryrun.messages import DryRunResult, Limits
from muri.profiler.dryrun.runner import measure_script
from muri.profiler.records import STAGES
from muri_lab.benchmarks.machine import describe_machine

HERE = Path(__file__).parent
RESULT = HERE / "results" / "dry_run.json"
JOB = HERE / "dry_run_job.py"
EXAMPLES = HERE.parents[2] / "examples"
JOBS = ("storage", "cpu", "gpu", "network")
MOST_ITERATIONS = 40
STAGE_TOLERANCE, REPEAT_TOLERANCE = 0.05, 0.10
MOST_TRIES = 5
SURE = 0.9
"""A dry run with less confidence says itself that another one may differ."""


@dataclass(frozen=True, slots=True)
class Case:
    """A loop with known stage times."""

    name: str
    stages_ms: tuple[float, float, float, float]
    load: str = "sleep"
    prefetch: int = 0

    def iteration_ms(self, stopwatch_ms: float) -> float:
        """What an iteration takes; with prefetching its own stopwatch tells, as Python hands its lock over slowly."""
        return stopwatch_ms if self.prefetch else sum(self.stages_ms)

    def owned_ms(self, stopwatch_ms: float) -> tuple[float, ...]:
        """What each stage owns: of hidden loading only what the loop waits for."""
        loop_ms = sum(self.stages_ms[1:])
        return (max(0.0, self.iteration_ms(stopwatch_ms) - loop_ms), *self.stages_ms[1:])


CASES = (
    Case("sleeps, storage", (40, 10, 8, 5)),
    Case("computes, CPU", (8, 40, 10, 4)),
    Case("computes, GPU", (5, 8, 45, 6)),
    Case("sleeps, network", (5, 6, 10, 40)),
    Case("short iterations", (3, 1, 6, 1)),
    Case("two stages nearly equal", (30, 4, 33, 4)),
    Case("reads at a limited rate", (36, 6, 14, 4), "read"),
    Case("prefetch, reading longer", (60, 10, 12, 6), "read", 1),
    Case("prefetch, reading shorter", (25, 8, 30, 8), "read", 1),
    Case("prefetch, reading just longer", (44, 6, 20, 10), "sleep", 1),
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--job", "jobs", multiple=True, type=click.Choice(JOBS), help="Repeat only this example job; may be repeated."
)
@click.option("--write/--no-write", "stored", default=True, help=f"Keep it in benchmarks/results/{RESULT.name}.")
def main(jobs: tuple[str, ...], stored: bool) -> None:
    """Measure how well dry runs find known stage times and agree with each other; exit with 1 if one misses its bar.

    \b
    Examples:
      python -m muri_lab.benchmarks.dry_run                          all
      python -m muri_lab.benchmarks.dry_run --job gpu --no-write
    """
    start_s = time.monotonic()
    synthetic = [_synthetic(case) for case in CASES]
    repeated = [_repeated(job) for job in jobs or JOBS]
    passed = all(case["passed"] for case in synthetic) and all(job["passed"] for job in repeated)
    document = {
        "machine": describe_machine(),
        "synthetic": synthetic,
        "repeated": repeated,
        "passed": passed,
        "took_s": round(time.monotonic() - start_s),
    }
    if stored:
        RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(0 if passed else 1)


def _synthetic(case: Case) -> dict[str, Any]:
    command = [str(JOB), *map(str, case.stages_ms), "--load", case.load, "--prefetch", str(case.prefetch)]
    with tempfile.NamedTemporaryFile(mode="r", encoding="utf-8") as log:
        result, tries = _undisturbed([*command, "--log", log.name])
        began_s = [float(line) for line in log.read().splitlines()[-result.iterations :]]
    stopwatch_ms = 1000 * statistics.median(later - earlier for earlier, later in itertools.pairwise(began_s))
    owned_ms, iteration_ms = case.owned_ms(stopwatch_ms), case.iteration_ms(stopwatch_ms)
    measured_ms = [value * 1000 for value in result.stage_s]
    errors = [
        abs(found - true) / true
        for found, true in zip(measured_ms, owned_ms, strict=True)
        if true >= STAGE_TOLERANCE * iteration_ms
    ]
    dominant = max(range(4), key=lambda stage: owned_ms[stage])
    right = max(range(4), key=lambda stage: measured_ms[stage]) == dominant
    passed = right and max(errors) <= STAGE_TOLERANCE and result.iterations <= MOST_ITERATIONS
    told = f"{max(errors):.1%} off at most, {STAGES[dominant]} {'found' if right else 'MISSED'}, {_about(result)}"
    click.echo(f"{'ok ' if passed else 'BAD'} {case.name}: {told}", err=True)
    return asdict(case) | {
        "true_ms": owned_ms,
        "measured_ms": [round(value, 3) for value in measured_ms],
        "busy_ms": [round(value * 1000, 3) for value in result.detail.busy_s or ()],
        "largest_error": round(max(errors), 4),
        "dominant_right": right,
        "tries": tries,
        "passed": passed,
        **_facts(result),
    }


def _undisturbed(command: list[str]) -> tuple[DryRunResult, int]:
    """A dry run that does not say of itself that others disturbed it, and how many it took; at most `MOST_TRIES`."""
    tries, result = 1, measure_script(command, limits=Limits())
    while (result.detail.confidence or 0) < SURE and tries < MOST_TRIES:
        tries, result = tries + 1, measure_script(command, limits=Limits())
    return result, tries


def _repeated(job: str, times: int = 4) -> dict[str, Any]:
    command = [str(EXAMPLES / f"train_{job}.py"), "--iterations", "100000"]
    results = [measure_script(command, limits=Limits()) for _ in range(times)]
    sure = [result for result in results if (result.detail.confidence or 0) >= SURE]
    apart, sure_apart = _apart(results), _apart(sure)
    passed = sure_apart <= REPEAT_TOLERANCE
    click.echo(
        f"{'ok ' if passed else 'BAD'} {job}: {times} runs differ by {apart:.1%} at most, "
        f"the {len(sure)} sure ones by {sure_apart:.1%}; {'; '.join(_about(result) for result in results)}",
        err=True,
    )
    runs = [{"stage_s": result.stage_s, "iteration_s": result.iteration_s, **_facts(result)} for result in results]
    return {"job": job, "differ": apart, "sure": len(sure), "sure_differ": sure_apart, "passed": passed, "runs": runs}


def _apart(results: list[DryRunResult]) -> float:
    """How far any two are apart at most, in the iteration time or in the dominant stage's."""
    pairs = [
        abs(one - two) / min(one, two)
        for first, second in itertools.combinations(results, 2)
        for one, two in (
            (first.iteration_s, second.iteration_s),
            (max(first.stage_s), second.stage_s[first.stage_s.index(max(first.stage_s))]),
        )
    ]
    return max(pairs, default=0.0)


def _about(result: DryRunResult) -> str:
    return f"{result.iterations} iterations, confidence {result.detail.confidence or 0:.2f}"


def _facts(result: DryRunResult) -> dict[str, Any]:
    detail = result.detail
    return {
        "iterations": result.iterations,
        "warmup": detail.warmup_iterations,
        "confidence": round(detail.confidence or 0.0, 4),
        "stopped": result.stopped,
    }


if __name__ == "__main__":
    main()
