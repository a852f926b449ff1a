"""`muri profile predict --module FILE.py:factory`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from muri.profiler.commands.options import console, json_option, open_store, store_option
from muri.profiler.prediction.documents import put_features
from muri.profiler.prediction.factory import InputSpec, build
from muri.profiler.prediction.memory import DEFAULT_OPTIMIZER, OPTIMIZER_STATES
from muri.profiler.records import STAGES, ProfileKey

if TYPE_CHECKING:
    from muri.profiler.prediction.estimate import Prediction
    from muri.profiler.prediction.features import GraphFeatures
    from muri.profiler.prediction.regression import Estimate


class Asked(NamedTuple):
    """The model that is meant, as given on the command line."""

    target: str
    inputs: tuple[str, ...]
    batch_size: int
    gpu_type: str
    model: str | None


class WithModule(click.Command):
    """A command that hands over to `predict_graph_command` where --module is given."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """The context of the command that is meant."""
        if any(item == "--module" or item.startswith("--module=") for item in args):
            return predict_graph_command.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


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
    """Predict what a model will need from its graph, without running it.

    FILE.py is loaded and FACTORY() called, without memory for weights where it allows that. What is
    predicted rests on the measured profiles in the store whose graphs are known; the interval is
    meant to hold the truth nine times in ten. Memory follows a formula.

    With --keep-as the features stay in the store: MODEL is predicted with every batch size, and once it
    is measured, other predictions learn from it.

    \b
    Examples:
      muri profile predict --module model.py:build --input 3x32x32 --batch-size 64
      muri profile predict --module gpt.py:make --input int:1024 --batch-size 8 \\
          --gpu-type a100 --optimizer adam --json
    """
    found = _predicted(Asked(**asked), optimizer, store_path)
    if as_json:
        click.echo(json.dumps(_document(found), indent=2))
    else:
        _print(found, asked["target"])


def _predicted(asked: Asked, optimizer: str, store_path: Path | None) -> "Prediction":
    """Tell the features, keep them where that was asked for, and predict from the store's profiles."""
    from muri.profiler.prediction.estimate import check_enough, predict  # -- loads NumPy

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


def _features(asked: Asked, specs: Sequence[InputSpec]) -> "GraphFeatures":
    """Of the model that the factory makes."""
    model = build(asked.target)
    from muri.profiler.prediction.graph import features_of  # -- imports PyTorch

    return features_of(model, [spec.example(asked.batch_size) for spec in specs])


def _figures(found: "Prediction") -> "dict[str, Estimate]":
    shares = {f"{stage}_share": share for stage, share in zip(STAGES, found.shares, strict=True)}
    return {"device_utilisation": found.utilisation, **shares, "iteration_s": found.iteration_s}


def _document(found: "Prediction") -> dict[str, Any]:
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
        "learnt_from": {"profiles": found.profiles, "families": found.families},
    }


def _print(found: "Prediction", target: str) -> None:
    """A table of 80 columns, and the memory's terms."""
    from rich.table import Table  # -- rich takes a while to load

    table = Table("figure", box=None, pad_edge=False)
    for heading in ("predicted", "least", "most"):
        table.add_column(heading, justify="right")
    for name, figure in _figures(found).items():
        table.add_row(name.removesuffix("_s").replace("_", " "), *(_text(name, value) for value in figure))
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
    out.print(f"learnt from {found.profiles} profiles of {found.families} model families")


def _text(name: str, value: float) -> str:
    return f"{value * 1e3:,.1f} ms" if name.endswith("_s") else f"{value:.0%}"
