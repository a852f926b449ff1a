"""`muri profile list` and `muri profile show`."""

import json
from datetime import UTC, datetime
from pathlib import Path

import click

from muri.profiler.commands.options import console, json_option, open_store, store_option, wanted_options
from muri.profiler.errors import StoreMissingError
from muri.profiler.exchange import to_dict, to_json
from muri.profiler.lookup import Wanted, find_one


@click.command("list", short_help="List all profiles.")
@store_option
@json_option
def list_command(store_path: Path | None, as_json: bool) -> None:
    """List all profiles.

    \b
    Examples:
      muri profile list
      muri profile list --json | jq -r '.profiles[].model'
    """
    try:
        with open_store(store_path, read_only=True) as store:
            profiles = store.list()
    except StoreMissingError:
        if store_path is not None:
            raise
        profiles = ()  # a cluster that has measured nothing yet is no error
    if as_json:
        click.echo(to_json(profiles), nl=False)
    elif profiles:
        from muri.profiler.render import print_table  # noqa: PLC0415 -- rich takes a while to load

        print_table(console(), profiles, datetime.now(UTC))
    else:
        click.echo("No profiles yet: the first job of a model is measured in a dry run.")


@click.command("show", short_help="Show a profile with its stages as bars.")
@wanted_options
@store_option
@json_option
def show_command(wanted: Wanted, store_path: Path | None, as_json: bool) -> None:
    """Show the profile of MODEL with its stages as bars.

    \b
    Examples:
      muri profile show resnet18
      muri profile show resnet18 --batch-size 64 --gpus 2 --gpu-type a100
      muri profile show resnet18 --json
    """
    with open_store(store_path, read_only=True) as store:
        key = find_one((item.key for item in store.list()), wanted)
        history = store.history(key)
    if as_json:
        document = to_dict(history[0]) | {"history": [to_dict(item) for item in history[1:]]}
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    from muri.profiler.render import print_profile  # noqa: PLC0415 -- rich takes a while to load

    print_profile(console(), history[0], history, datetime.now(UTC))
