"""`muri profile list` and `muri profile show`."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from muri.profiler.commands.complete import complete_gpu_type, complete_model
from muri.profiler.commands.options import console, json_option, open_if_any, open_store, store_option, wanted_options
from muri.profiler.exchange import to_dict, to_json
from muri.profiler.listing import SORTS, Filter, listed
from muri.profiler.lookup import Wanted, find_one
from muri.profiler.records import RESOURCES, SOURCES, ProfileKey, StageProfile


@click.command("list", short_help="List profiles, sorted and filtered.")
@click.option("--sort", type=click.Choice(tuple(SORTS)), default="model", show_default=True, help="Order.")
@click.option("--reverse", is_flag=True, help="The other way round.")
@click.option("--model", shell_complete=complete_model, help="Only this model; * and ? stand for any letters.")
@click.option("--batch-size", type=click.IntRange(0), help="Only of this batch size (0: not known).")
@click.option("--gpus", "gpu_count", type=click.IntRange(1), help="Only of jobs with so many GPUs.")
@click.option("--gpu-type", shell_complete=complete_gpu_type, help="Only of this GPU type.")
@click.option("--source", type=click.Choice(SOURCES), help="Only from this source.")
@click.option("--bottleneck", type=click.Choice(RESOURCES), help="Only where this resource is held longest.")
@click.option("--stale", is_flag=True, help="Only what is to be measured again.")
@store_option
@json_option
def list_command(sort: str, reverse: bool, store_path: Path | None, as_json: bool, **wanted: Any) -> None:
    """List profiles.

    The newest, longest, largest and least sure come first. ~ marks an estimate, ! a profile that is
    to be measured again.

    \b
    Examples:
      muri profile list --sort iteration
      muri profile list --model 'resnet*' --gpu-type a100 --bottleneck cpu
      muri profile list --stale --sort age --reverse
      muri profile list --json | jq -r '.profiles[].model'
    """
    stored, stale = _read(store_path)
    profiles = listed(stored, Filter(**wanted), stale, sort, reverse=reverse)
    if as_json:
        click.echo(to_json(profiles), nl=False)
    elif profiles:
        from muri.profiler.render import print_table  # -- rich takes a while to load

        print_table(console(), profiles, datetime.now(UTC), stale)
    elif stored:
        click.echo(f"None of the {len(stored)} profiles matches.")
    else:
        click.echo("No profiles yet: the first job of a model is measured in a dry run.")


def _read(store_path: Path | None) -> tuple[tuple[StageProfile, ...], frozenset[ProfileKey]]:
    """All profiles, and the keys of the stale ones."""
    store = open_if_any(store_path)
    if store is None:
        return (), frozenset()
    with store:
        return store.list(), frozenset(mark.key for mark in store.stale_marks())


@click.command("show", short_help="Show a profile with its stages as bars.")
@wanted_options
@store_option
@json_option
def show_command(wanted: Wanted, store_path: Path | None, as_json: bool) -> None:
    """Show the profile of MODEL: the iteration and its stages as bars, and all else that was measured.

    A stage owns the time in which its resource is the most used one of all; where a resource is also
    busy while another owns the time, the light part of its bar says how long.

    \b
    Examples:
      muri profile show resnet18
      muri profile show resnet18 --batch-size 64 --gpus 2 --gpu-type a100
      muri profile show resnet18 --json
    """
    with open_store(store_path, read_only=True) as store:
        key = find_one((item.key for item in store.list()), wanted)
        history = store.history(key)
        stale = next((mark for mark in store.stale_marks() if mark.key == key), None)
    if as_json:
        document = to_dict(history[0]) | {"history": [to_dict(item) for item in history[1:]]}
        document |= {"stale": None if stale is None else {"since": stale.since, "reason": stale.reason}}
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    from muri.profiler.render_profile import print_profile  # -- rich takes a while to load

    print_profile(console(), history, datetime.now(UTC), stale)
