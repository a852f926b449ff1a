"""How well the predictor predicts: leave-one-model-out errors, coverage of the intervals, memory, time to learn."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from muri.profiler.exchange import to_dict
from muri.profiler.store import ProfileStore
from muri_lab.benchmarks import predictor_memory
from muri_lab.benchmarks.cross_validation import PREDICTORS, Score, leave_one_model_out
from muri_lab.benchmarks.machine import describe_machine
from muri_lab.benchmarks.saved_zoo import ZOO, saved_zoo
from muri_lab.prediction.features import Example, examples
from muri_lab.prediction.predictor import TARGETS, fit_all

RESULTS = Path(__file__).parent / "results"
PREDICTOR = RESULTS / "predictor.json"


def save_zoo(found: Sequence[Example]) -> None:
    """Keep what was measured, so that the errors can be told again."""
    entries = [{"profile": to_dict(item.profile), "features": item.features.to_dict()} for item in found]
    lines = ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    machine = json.dumps(describe_machine() | {"load_1min": round(os.getloadavg()[0], 1)})
    ZOO.write_text(f'{{"machine": {machine},\n "entries": [\n  {lines}\n]}}\n', encoding="utf-8")


def from_store(path: Path, gpu_type: str) -> tuple[Example, ...]:
    """What a store that `profile_zoo.py` filled holds."""
    with ProfileStore(path, read_only=True) as store:
        return examples(store, gpu_type)


def learning(found: tuple[Example, ...]) -> dict[str, float]:
    """Seconds to learn all targets."""
    fit_all.cache_clear()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    fit_all(found)
    return {
        "wall_s": round(time.perf_counter() - wall_s, 2),
        "cpu_s": round(time.process_time() - cpu_s, 2),
        "examples": len(found),
    }


def _rounded(score: Score) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in score._asdict().items()}


def verdicts(scores: Sequence[Score]) -> dict[str, bool]:
    """Per target, whether the trees' RMSLE is below both others'."""
    error = {(item.target, item.predictor): item.rmsle for item in scores}
    names = dict.fromkeys(item.target for item in scores)
    return {name: all(error[name, "trees"] < error[name, other] for other in ("linear", "mean")) for name in names}


def table(scores: Sequence[Score]) -> str:
    """The errors as a table of text."""
    lines = [f"{'target':<20}{'predictor':<11}{'RMSLE':>7}{'MAE':>9}  unit  in the 90 % interval"]
    lines += [
        f"{item.target:<20}{item.predictor:<11}{item.rmsle:7.3f}{item.mae:9.2f}  {item.unit:<4}  {item.covered:.0%}"
        for item in scores
    ]
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--store", "store_path", type=click.Path(dir_okay=False, exists=True, path_type=Path))
@click.option("--gpu-type", default="cpu", show_default=True, help="What to learn from in the store.")
@click.option(
    "--memory/--no-memory", "with_memory", default=True, help="Compare the memory formula with PyTorch's peak."
)
@click.option("--write/--no-write", "stored", default=True, help="Keep it in lab/muri_lab/benchmarks/results/.")
def main(store_path: Path | None, gpu_type: str, with_memory: bool, stored: bool) -> None:
    """Tell the predictor's errors; exit with 1 where it is not better than the mean and a linear one.

    \b
    Examples:
      python -m muri_lab.benchmarks.predictor                    of lab/muri_lab/benchmarks/results/zoo.json
      python -m muri_lab.benchmarks.predictor --store zoo.db     of what profile_zoo.py measured, which is kept
    """
    found = from_store(store_path, gpu_type) if store_path else saved_zoo()
    if store_path and stored:
        save_zoo(found)
    scores = leave_one_model_out(found)
    better = verdicts(scores)
    result: dict[str, Any] = {
        "machine": describe_machine() | {"load_1min": round(os.getloadavg()[0], 1)},
        "profiles": len(found),
        "families": len({item.family for item in found}),
        "targets": [item.name for item in TARGETS],
        "predictors": list(PREDICTORS),
        "scores": [_rounded(item) for item in scores],
        "better_than_both": better,
        "learning": learning(found),
    }
    if with_memory:
        result["memory"] = predictor_memory.measure()
    if stored:
        PREDICTOR.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    click.echo(table(scores))
    click.echo(json.dumps({"learning": result["learning"], "memory": result.get("memory", {}).get("error")}))
    for name, passed in better.items():
        click.echo(f"{'pass' if passed else 'FAIL'}  {name}: RMSLE below the mean's and the linear one's")
    raise SystemExit(0 if all(better.values()) else 1)


if __name__ == "__main__":
    main()
