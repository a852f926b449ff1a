"""Commands that only read the store: `muri profile list` and `show`."""

from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from muri.profiler.commands.options import (
    complete_gpu_type,
    complete_model,
    console,
    echo_json,
    json_option,
    open_store,
    read_if_any,
    store_option,
    user_option,
    wanted_options,
    why_none,
)
from muri.profiler.errors import NoSuchProfileError
from muri.profiler.exchange import to_dict, to_json
from muri.profiler.lookup import PUBLISHED, SORTS, Filter, Wanted, find_one, listed
from muri.profiler.records import ProfileKey, StageProfile, owned_name
from muri.profiler.sensitivity import stored as sweep_of
from muri.profiler.store import ProfileStore, StaleMark


@click.command("list", short_help="List profiles, sorted and filtered.")
@click.option("--sort", type=click.Choice(tuple(SORTS)), default="model", show_default=True, help="Order.")
@click.option("--model", shell_complete=complete_model, help="Only this model; * and ? stand for any letters.")
@click.option("--gpu-type", shell_complete=complete_gpu_type, help="Only of this GPU type.")
@user_option(f"Only of this user; {PUBLISHED}: published for all.")
@store_option
@json_option
def list_command(sort: str, store_path: Path | None, as_json: bool, **wanted: Any) -> None:
    """List profiles, and why some are to be measured again.

    The newest, longest, largest and least sure come first. ~ marks an estimate, ! a profile that is
    to be measured again. Who may not change the store sees his own profiles and published ones.

    \b
    Examples:
      muri profile list --sort iteration
      muri profile list --model 'resnet*' --gpu-type a100
      muri profile list --json | jq -r '.profiles[].model'
    """
    stored = read_if_any(store_path, ProfileStore.list)
    profiles = listed(stored, Filter(**wanted), sort)
    if as_json:
        click.echo(to_json(profiles), nl=False)
    elif profiles:
        from muri.profiler.render import print_table  # rich takes a while to load

        shown, known = {profile.key for profile in profiles}, {profile.key for profile in stored}
        marks = read_if_any(store_path, ProfileStore.stale_marks)
        print_table(console(), profiles, datetime.now(UTC), [mark for mark in marks if _doubted(mark, known) in shown])
    elif stored:
        click.echo(f"None of the {len(stored)} profiles matches.")
    else:
        click.echo(why_none(store_path))


def _doubted(mark: StaleMark, known: Collection[ProfileKey]) -> ProfileKey | None:
    """Returns the profile that serves the jobs of a mark: their user's own, else the published one."""
    return next((key for key in mark.key.lookup_order if key in known), None)


@click.command("show", short_help="Show a profile with its stages as bars.")
@wanted_options
@store_option
@json_option
def show_command(wanted: Wanted, store_path: Path | None, as_json: bool) -> None:
    """Show the profile of MODEL: the iteration and its stages as bars, and all other measurements.

    A stage owns the time in which its resource is used most. The light part of its bar says how long
    the resource is busy while another one owns the time. What a sweep over CPUs and memory has measured
    of MODEL stands below (`muri profile run --sweep`, and dry runs under policy synergy).

    \b
    Examples:
      muri profile show resnet18
      muri profile show resnet18 --batch-size 64 --gpus 2 --gpu-type a100
      muri profile show resnet18 --json
    """
    with open_store(store_path, read_only=True) as store:
        known = [item.key for item in store.list()]
        history: tuple[StageProfile, ...] = ()
        sweep = sweep_of(store, owned_name(wanted.model, wanted.user or ""))
        try:
            key = find_one(known, wanted)
        except NoSuchProfileError:
            if sweep is None or any(each.model == wanted.model for each in known):
                raise
            stale = None  # only a sweep has been made
        else:
            history = store.history(key)
            sweep = sweep_of(store, str(key)) or sweep  # of dry runs of this size, else of `profile run --sweep`
            stale = next((mark for mark in store.stale_marks() if _doubted(mark, known) == key), None)
    if as_json:
        document: dict[str, Any] = to_dict(history[0]) if history else {}
        document |= {"history": [to_dict(item) for item in history[1:]]}
        mark = None if stale is None else {"since": stale.since, "reason": stale.reason, "who": stale.who}
        document |= {"stale": mark}
        document |= {"sweep": None if sweep is None else sweep.to_json()}
        echo_json(document)
        return
    from muri.profiler.render import print_profile, print_sensitivity

    if history:
        print_profile(console(), history, datetime.now(UTC), stale)
    if sweep is not None:
        print_sensitivity(console(), sweep)
