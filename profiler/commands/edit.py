"""`muri profile edit`."""

import json
from pathlib import Path
from typing import Any

import click

from muri.profiler.commands.options import author, json_option, open_store, store_option, wanted_options
from muri.profiler.edits import Edit, edited
from muri.profiler.exchange import to_dict
from muri.profiler.lookup import Wanted, find_one


@click.command("edit", short_help="Correct a profile's figures by hand.")
@wanted_options
@click.option("--load-ms", type=float, help="Milliseconds per iteration that storage owns.")
@click.option("--preprocess-ms", type=float, help="Milliseconds per iteration that the CPU owns.")
@click.option("--propagate-ms", type=float, help="Milliseconds per iteration that the GPU owns.")
@click.option("--synchronize-ms", type=float, help="Milliseconds per iteration that the network owns.")
@click.option("--iteration-ms", type=float, help="Milliseconds of a whole iteration.")
@click.option("--gpu-mem-gib", type=float, help="Peak GPU memory.")
@store_option
@json_option
def edit_command(wanted: Wanted, store_path: Path | None, as_json: bool, **figures: float | None) -> None:
    """Correct figures of MODEL's profile; the old ones stay in its history.

    The profile's source becomes "edit", and who changed what and when stands in `muri profile audit`.

    \b
    Examples:
      muri profile edit resnet18 --gpu-mem-gib 5.5
      muri profile edit resnet18 --batch-size 64 --load-ms 120 --iteration-ms 480
    """
    by = author("edit")
    with open_store(store_path, existing=True) as store:
        key = find_one((item.key for item in store.list()), wanted)
        old = store.history(key)[0]
        new = edited(old, Edit(**figures), by.at)
        store.put_all((new,), by)
    before, after = to_dict(old), to_dict(new)
    if as_json:
        click.echo(json.dumps({"before": before, "after": after}, indent=2, ensure_ascii=False))
        return
    click.echo(str(key))
    for line in changes(before, after):
        click.echo(f"  {line}")


def changes(before: dict[str, Any] | None, after: dict[str, Any] | None) -> list[str]:
    """What differs between two exports of a profile, a line for each figure."""
    old, new = before or {}, after or {}
    skip = {"measured_at", "detail", "model", "batch_size", "gpu_count", "gpu_type"}
    names = [name for name in {**old, **new} if name not in skip and old.get(name) != new.get(name)]
    return [f"{name}: {_figure(old.get(name))} → {_figure(new.get(name))}" for name in names]


def _figure(value: object) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
