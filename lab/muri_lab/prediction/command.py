"""The two commands `muri-lab predict`: of a known model, and with --module of a model's code."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from muri.profiler.commands.stored import console, echo_json, json_option, open_store, store_option, wanted_options
from muri.profiler.errors import NoSuchProfileError
from muri.profiler.estimates import ProfileEstimate, estimated
from muri.profiler.exchange import to_dict
from muri.profiler.lookup import Wanted, find_all
from muri.profiler.records import STAGES, ProfileKey, StageProfile
from muri.profiler.render import add_figures, milliseconds
from muri_lab.prediction.factory import InputSpec, build
from muri_lab.prediction.features import DEFAULT_OPTIMIZER, OPTIMIZER_STATES, GraphFeatures, put_features
from muri_lab.prediction.predictor import keys_with_features
from muri_lab.selectors import key_for

if TYPE_CHECKING:
    from muri_lab.prediction.predictor import Estimate, Prediction


class WithModule(click.Command):
    """A command that hands over to `predict_graph_command`, with other arguments, where --module is given."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """The context of the command that the arguments mean."""
        if any(item == "--module" or item.startswith("--module=") for item in args):
            return predict_graph_command.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command("predict", cls=WithModule, short_help="Estimate a profile that was not measured.")
@wanted_options
@store_option
@json_option
def predict_command(store_path: Path | None, as_json: bool, **given: Any) -> None:
    """Estimate the profile of MODEL on --gpus GPUs, without running anything.

    The estimate scales the profile on another number of GPUs: each GPU's own work stays as it is, and
    the all-reduce follows a ring model. Without such a profile it follows from the model's graph, if
    the store has its features. A measured profile is shown beside it. Options that are left out are
    taken from the known profiles of the model. The interval of a scaled profile held nine in ten of
    the published measurements that it was checked with.

    A model that was never profiled is predicted from its code: see --module FILE.py:FACTORY --help.

    \b
    Examples:
      muri-lab predict resnet18 --gpus 4
      muri-lab predict --module model.py:build --input 3x32x32 --batch-size 64
      muri-lab predict resnet18 --gpus 8 --gpu-type a100 --json
    """
    wanted = Wanted(**given)
    with open_store(store_path, read_only=True) as store:
        known = {item.key for item in store.list()} | keys_with_features(store)
        key = key_for(known, wanted)
        found = estimated(store, key)
        stored = store.get(key)
    measured = stored if stored is not None and not stored.is_estimate else None
    if found is None:
        find_all(known, Wanted(wanted.model))  # an unknown model: the nearest names
        beside = " It is measured: see `muri profile show`." if measured else ""
        raise NoSuchProfileError(
            f"nothing to estimate {key} from: no profile of it on another number of GPUs, and its graph is not known "
            f"or too few profiles on {key.gpu_count} × {key.gpu_type} to learn from."
            f"{beside or ' Measure it: muri profile run'}"
        )
    if as_json:
        echo_json(_estimate_document(found, measured))
        return
    print_estimate(console(), found, measured)


def _estimate_document(found: ProfileEstimate, measured: StageProfile | None) -> dict[str, Any]:
    names = [*(f"{stage}_s" for stage in STAGES), "iteration_s"]
    return {
        "estimate": to_dict(found.profile),
        "interval": {name: list(ends) for name, ends in zip(names, found.interval_s, strict=True)},
        "basis": list(found.basis),
        "measured": None if measured is None else to_dict(measured),
    }


class ModelRequest(NamedTuple):
    """The model to predict, as given on the command line."""

    target: str
    inputs: tuple[str, ...]
    batch_size: int
    gpu_type: str
    model: str | None


@click.command("predict", short_help="Predict from a model's graph.")
@click.option("--module", "target", required=True, metavar="FILE.py:FACTORY", help="FACTORY() returns the model.")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    required=True,
    metavar="[int:]SHAPE",
    help="Shape of one sample, such as 3x32x32 or int:128; repeat for further inputs.",
)
@click.option("--batch-size", type=click.IntRange(1), required=True, help="Samples per iteration and GPU.")
@click.option("--gpu-type", default="gpu", show_default=True, help="Learn from this type; cpu: nodes without GPU.")
@click.option("--keep-as", "model", metavar="MODEL", help="Keep the graph's features beside the profiles of MODEL.")
@click.option("--optimizer", type=click.Choice(list(OPTIMIZER_STATES)), default=DEFAULT_OPTIMIZER, show_default=True)
@store_option
@json_option
def predict_graph_command(optimizer: str, store_path: Path | None, as_json: bool, **asked: Any) -> None:
    """Predict a model's needs from its graph, without running it.

    FILE.py is loaded and FACTORY() called, without memory for weights where it allows that. The
    prediction is learned from the measured profiles in the store whose graphs are known; its interval
    should hold the truth nine times in ten. Memory follows a formula.

    With --keep-as the store keeps the features: they serve to predict MODEL with every batch size and,
    once MODEL is measured, to predict other models.

    \b
    Examples:
      muri-lab predict --module model.py:build --input 3x32x32 --batch-size 64
      muri-lab predict --module gpt.py:make --input int:1024 --batch-size 8 \\
          --gpu-type a100 --optimizer adam --json
    """
    found = _predicted(ModelRequest(**asked), optimizer, store_path)
    if as_json:
        echo_json(_prediction_document(found))
    else:
        _print_prediction(found, asked["target"])


def _predicted(asked: ModelRequest, optimizer: str, store_path: Path | None) -> "Prediction":
    """Read the features, keep them where --keep-as says so, and predict from the store's profiles."""
    from muri_lab.prediction.predictor import check_enough, predict

    specs = [InputSpec.parse(text) for text in asked.inputs]
    with open_store(store_path, read_only=asked.model is None) as store:
        if asked.model is None:
            check_enough(store, asked.gpu_type)  # before PyTorch is loaded, which takes seconds
        features = _features(asked, specs)
        if asked.model is not None:
            put_features(store, ProfileKey(asked.model, asked.batch_size, 1, asked.gpu_type), features)
            click.echo(f"kept the features of {asked.model}", err=True)
        known = check_enough(store, asked.gpu_type)
    return predict(features, known, optimizer)


def _features(asked: ModelRequest, specs: Sequence[InputSpec]) -> GraphFeatures:
    """The features of the model that the factory makes."""
    model = build(asked.target)
    from muri_lab.prediction.graph import features_of  # imports PyTorch

    return features_of(model, [spec.example(asked.batch_size) for spec in specs])


def _figures(found: "Prediction") -> "dict[str, Estimate]":
    shares = {f"{stage}_share": share for stage, share in zip(STAGES, found.shares, strict=True)}
    return {"device_utilization": found.utilization, **shares, "iteration_s": found.iteration_s}


def _prediction_document(found: "Prediction") -> dict[str, Any]:
    memory = found.memory
    return {
        "predicted": {name: figure._asdict() for name, figure in _figures(found).items()},
        "memory_gib": {
            "parameters": memory.parameters_gib,
            "optimizer": memory.optimizer_gib,
            "activations": memory.activations_gib,
            "gradients": memory.gradients_gib,
            "framework": memory.framework_gib,
            "allocated": memory.allocated_gib,
            "total": memory.total_gib,
            "allocated_interval": found.allocated_gib._asdict() if found.allocated_gib else None,
        },
        "features": found.features.to_dict(),
        "learned_from": {"profiles": found.profiles, "families": found.families},
    }


def _print_prediction(found: "Prediction", target: str) -> None:
    """A table of 80 columns, and the memory's terms."""
    table = Table("figure", box=None, pad_edge=False)
    for heading in ("predicted", "least", "most"):
        table.add_column(heading, justify="right")
    for name, figure in _figures(found).items():
        table.add_row(name.removesuffix("_s").replace("_", " "), *(_figure_text(name, value) for value in figure))
    memory, features = found.memory, found.features
    out = console()
    counted = "exported graph" if features.method == "export" else "calls of its forward pass; it could not be exported"
    out.print(f"{target}, batch {features.batch_size}: {features.parameters:,} parameters, depth {features.depth}")
    out.print(f"{features.training_flops / 1e9:,.3g} GFLOP in a step; operators from the {counted}\n")
    out.print(table)
    out.print(
        f"\nmemory {memory.total_gib:.2f} GiB: activations {memory.activations_gib:.2f}, "
        f"parameters {memory.parameters_gib:.2f},\n  optimizer {memory.optimizer_gib:.2f}, "
        f"gradients {memory.gradients_gib:.2f}, framework {memory.framework_gib:.2f} (stated, not measured)"
    )
    if found.allocated_gib:
        _, low, high = found.allocated_gib
        out.print(f"  without framework {low:.2f} to {high:.2f} GiB, by what was measured of other models")
    else:
        out.print("  no interval: too few profiles with GPU memory")
    out.print(f"learned from {found.profiles} profiles of {found.families} model families")


def _figure_text(name: str, value: float) -> str:
    return f"{value * 1e3:,.1f} ms" if name.endswith("_s") else f"{value:.0%}"


def print_estimate(console: Console, found: ProfileEstimate, measured: StageProfile | None) -> None:
    """Print value and interval of each stage and the iteration, in milliseconds, and their basis."""
    profile = found.profile
    console.print(Text(f"{profile.key}: {profile.source}, not measured", style="bold"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ms per iteration")
    headings = ("ESTIMATE", "INTERVAL", *(("MEASURED", "ERROR") if measured else ()))
    add_figures(table, *headings)
    values = (*profile.stage_s, profile.iteration_s)
    truths = (*measured.stage_s, measured.iteration_s) if measured else (None,) * len(values)
    for name, value, (least_s, most_s), truth in zip(
        (*STAGES, "iteration"), values, found.interval_s, truths, strict=True
    ):
        ends = f"{milliseconds(least_s)} – {milliseconds(most_s)}"
        beside = () if truth is None else (milliseconds(truth), _error(value, truth))
        table.add_row(name, milliseconds(value), ends, *beside)
    console.print(table)
    console.print(Text(f"bottleneck: {profile.bottleneck}; GPU memory {profile.gpu_mem_gib:.1f} GiB"))
    for line in found.basis:
        console.print(Text(textwrap.fill(line, console.width, initial_indent="- ", subsequent_indent="  ")))


def _error(estimate_s: float, truth_s: float) -> str:
    return f"{100 * (estimate_s / truth_s - 1):+.0f} %" if truth_s else "-"
