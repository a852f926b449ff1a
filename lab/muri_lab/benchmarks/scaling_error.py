"""Estimates of profiles from other GPU counts beside measured ones: the error of each stage and of the iteration.

    python -m muri_lab.benchmarks.scaling_error --profiles ../shared/reference/stage_profiles.csv

The file has a row for each model and GPU count, in milliseconds. 2, 4, 8 GPUs (and apart from them 16 and 32, which are
several nodes) are estimated from the row of one GPU and from those of one and two. The rows hold no bandwidth: where
one is needed, it is the median over the *other* models at that GPU count. Figures go to
benchmarks/results/scaling_error.json.
"""

import csv
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from muri.profiler.allreduce import Bandwidth, ring_share
from muri.profiler.estimates import scale
from muri.profiler.records import ProfileDetail, ProfileKey, StageProfile
from muri.units import MIB
from muri_lab.benchmarks.machine import describe_machine

RESULT = Path(__file__).parent / "results" / "scaling_error.json"
ONE_NODE, SEVERAL_NODES = (2, 4, 8), (16, 32)

MILLION_PARAMETERS: dict[str, float] = {
    "resnet18": 11.69, "shufflenet_v2_x1_0": 2.28, "vgg16": 138.36, "vgg19": 143.67,  # torchvision's model table
    "bert": 109.5, "gpt2": 124.4,  # base sizes, by their authors
    "a2c": 1.69, "dqn": 1.69,  # the network of Mnih et al., Nature 2015
}  # fmt: skip
"""Gradients are as large as the parameters; four bytes each."""

Table = Mapping[str, Mapping[int, StageProfile]]
Intervals = tuple[tuple[float, float], ...]
Estimator = Callable[[Table, str, int], tuple[StageProfile, Intervals] | None]


def read(path: Path) -> Table:
    """Profiles by model and GPU count; the file does not tell load from preprocess, so preprocess has both."""
    table: dict[str, dict[int, StageProfile]] = {}
    with path.open() as stream:
        for row in csv.DictReader(stream):
            model, count = row["model"], int(row["num_gpus"])
            times = ("load_and_preprocess_ms", "propagate_ms", "synchronize_ms", "iteration_ms")
            detail = ProfileDetail(gradient_mib=MILLION_PARAMETERS[model] * 4e6 / MIB)
            key = ProfileKey(model, int(row["batch_size"]), count, "gpu")
            profile = StageProfile(key, 0.0, *(float(row[name]) / 1000 for name in times), detail=detail)
            table.setdefault(model, {})[count] = profile
    return table


def other_models_bandwidth(table: Table, model: str, count: int) -> tuple[Bandwidth, ...]:
    """What the all-reduces of the other models with this number of GPUs say about the network."""
    seen = [
        (profile.detail.gradient_mib or 0.0) * ring_share(count) / profile.synchronize_s
        for name, rows in table.items()
        if name != model and (profile := rows[count]).synchronize_s > 0
    ]
    return (Bandwidth("gpu", 1, count, statistics.median(seen), 0.0),)


def as_it_is(table: Table, model: str, count: int) -> tuple[StageProfile, Intervals] | None:
    """No model at all, to compare with: the profile of one GPU."""
    return table[model][1], ()


def from_one(table: Table, model: str, count: int) -> tuple[StageProfile, Intervals] | None:
    """From one GPU, with the other models' bandwidth."""
    one = table[model][1]
    return _scaled([one], one.key, count, other_models_bandwidth(table, model, count))


def from_one_assumed(table: Table, model: str, count: int) -> tuple[StageProfile, Intervals] | None:
    """From one GPU, with the assumed bandwidth."""
    one = table[model][1]
    return _scaled([one], one.key, count, ())


def from_one_and_two(table: Table, model: str, count: int) -> tuple[StageProfile, Intervals] | None:
    """From one and two GPUs."""
    one, two = table[model][1], table[model][2]
    return None if count == 2 else _scaled([one, two], one.key, count, ())


def _scaled(
    known: Sequence[StageProfile], key: ProfileKey, count: int, links: Sequence[Bandwidth]
) -> tuple[StageProfile, Intervals] | None:
    found = scale(known, ProfileKey(key.model, key.batch_size, count, key.gpu_type), links)
    return (found.profile, found.interval_s) if found else None


ESTIMATORS: dict[str, Estimator] = {
    "one GPU unchanged (baseline)": as_it_is,
    "from 1 GPU, other models' bandwidth": from_one,
    "from 1 GPU, assumed bandwidth": from_one_assumed,
    "from 1 and 2 GPUs": from_one_and_two,
}


def errors_of(table: Table, estimator: Estimator, counts: Iterable[int]) -> Iterator[dict[str, Any]]:
    """The errors of one estimator, a record for each model and GPU count."""
    for model, rows in table.items():
        for count in counts:
            found, truth = estimator(table, model, count), rows[count]
            if found is None:
                continue
            estimate, intervals = found
            truths = (*truth.stage_s, truth.iteration_s)
            inside = [least <= value <= most for (least, most), value in zip(intervals, truths, strict=False)]
            sync_ms = 1000 * abs(estimate.synchronize_s - truth.synchronize_s)
            yield {
                "model": model,
                "gpus": count,
                "iteration_percent": _percent(estimate.iteration_s, truth.iteration_s),
                "load_and_preprocess_percent": _percent(estimate.preprocess_s, truth.preprocess_s),
                "propagate_percent": _percent(estimate.propagate_s, truth.propagate_s),
                "synchronize_percent": _percent(estimate.synchronize_s, truth.synchronize_s),
                "synchronize_ms": sync_ms,
                "synchronize_percent_of_iteration": 0.1 * sync_ms / truth.iteration_s,
                "same_bottleneck": estimate.bottleneck == truth.bottleneck,
                "synchronize_in_interval": inside[-2] if inside else None,
                "iteration_in_interval": inside[-1] if inside else None,
            }


def _percent(estimate: float, truth: float) -> float:
    return 100 * abs(estimate - truth) / truth


def summary(errors: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median, 90th percentile and worst of each figure, and where the worst is."""
    found: dict[str, Any] = {"cases": len(errors)}
    for name in [name for name in errors[0] if name.endswith(("_percent", "_ms", "_iteration"))]:
        values = sorted(error[name] for error in errors)
        worst = max(errors, key=lambda error, name=name: float(error[name]))  # type: ignore[misc]
        p90 = values[min(len(values) - 1, int(0.9 * len(values)))]
        figures = {"median": statistics.median(values), "p90": p90, "worst": values[-1]}
        found[name] = {key: round(value, 2) for key, value in figures.items()}
        found[name]["worst_case"] = f"{worst['model']} on {worst['gpus']}"
    for name in ("same_bottleneck", "synchronize_in_interval", "iteration_in_interval"):
        known = [error[name] for error in errors if error[name] is not None]
        found[name] = sum(known) if known else None
    return found


def change_of_load(table: Table) -> dict[str, float]:
    """The largest change of load and preprocess, taken as unchanged, from one GPU to 2 - 8, in percent."""
    found = {}
    for model, rows in table.items():
        changes = (rows[count].preprocess_s / rows[1].preprocess_s - 1 for count in ONE_NODE)
        found[model] = round(100 * max(changes, key=abs), 1)
    return found


@click.command()
@click.option("--profiles", type=click.Path(exists=True, path_type=Path), required=True, help="The measured profiles.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=RESULT, show_default=True)
def main(profiles: Path, output: Path) -> None:
    """Compare estimates with measured profiles."""
    table = read(profiles)
    cases = {
        f"{name}; {where}": summary(list(errors_of(table, estimator, counts)))
        for where, counts in (("2, 4, 8 GPUs", ONE_NODE), ("16, 32 GPUs", SEVERAL_NODES))
        for name, estimator in ESTIMATORS.items()
    }
    result = {
        "machine": describe_machine(),
        "source": profiles.name,
        "errors": cases,
        "load_and_preprocess_change_percent": change_of_load(table),
    }
    output.write_text(json.dumps(result, indent=2) + "\n")
    for name, case in cases.items():
        inside = f"synchronize {case['synchronize_in_interval']}, iteration {case['iteration_in_interval']}"
        click.echo(f"{name}: {case['cases']} cases, {case['same_bottleneck']} with the same bottleneck")
        click.echo(f"  in the interval: {inside}")
        for figure in [item for item in case if isinstance(case[item], dict)]:
            values = case[figure]
            click.echo(
                f"  {figure:34} median {values['median']:8.2f}  p90 {values['p90']:8.2f}  "
                f"worst {values['worst']:8.2f}  {values['worst_case']}"
            )


if __name__ == "__main__":
    main()
