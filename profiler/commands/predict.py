"""`muri profile predict`."""

import json
from pathlib import Path
from typing import Any

import click

from muri.profiler.commands.options import console, json_option, open_store, store_option, wanted_options
from muri.profiler.commands.predict_graph import WithModule
from muri.profiler.errors import NoSuchProfileError
from muri.profiler.estimates import ProfileEstimate, estimated, keys_with_features
from muri.profiler.exchange import to_dict
from muri.profiler.lookup import Wanted, find_all, key_for
from muri.profiler.records import STAGES, StageProfile


@click.command("predict", cls=WithModule, short_help="Estimate a profile that was not measured.")
@wanted_options
@store_option
@json_option
def predict_command(wanted: Wanted, store_path: Path | None, as_json: bool) -> None:
    """Estimate the profile of MODEL on --gpus GPUs, without running anything.

    From its profile on another number of GPUs: each GPU's own work stays as it is, and the
    all-reduce follows a ring model. Else from the model's graph, where its features are known. A
    measured profile is shown beside it. What the options leave out is taken from what is known of
    the model. The interval of a scaled profile held nine in ten of the published measurements that
    it was checked with.

    A model that was never profiled is predicted from its code: see --module FILE.py:FACTORY --help.

    \b
    Examples:
      muri profile predict resnet18 --gpus 4
      muri profile predict --module model.py:build --input 3x32x32 --batch-size 64
      muri profile predict resnet18 --gpus 8 --gpu-type a100 --json
    """
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
        click.echo(json.dumps(_document(found, measured), indent=2, ensure_ascii=False))
        return
    from muri.profiler.render_estimate import print_estimate  # -- rich takes a while to load

    print_estimate(console(), found, measured)


def _document(found: ProfileEstimate, measured: StageProfile | None) -> dict[str, Any]:
    names = [*(f"{stage}_s" for stage in STAGES), "iteration_s"]
    return {
        "estimate": to_dict(found.profile),
        "interval": {name: list(ends) for name, ends in zip(names, found.interval_s, strict=True)},
        "basis": list(found.basis),
        "measured": None if measured is None else to_dict(measured),
    }
