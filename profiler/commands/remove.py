"""`muri profile rm`."""

from pathlib import Path

import click

from muri.profiler.commands.options import author, open_store, store_option, wanted_options
from muri.profiler.lookup import Wanted, find_all, find_one


@click.command("rm", short_help="Remove a profile; its model is measured again.")
@wanted_options
@click.option("--all-matching", is_flag=True, help="Remove all that match, not only one.")
@click.option("-y", "--yes", is_flag=True, help="Don't ask.")
@store_option
def rm_command(wanted: Wanted, all_matching: bool, yes: bool, store_path: Path | None) -> None:
    """Remove the profile of MODEL and its history; the next job of it is measured again.

    \b
    Examples:
      muri profile rm resnet18
      muri profile rm resnet18 --batch-size 64 --yes
      muri profile rm resnet18 --all-matching --yes
    """
    with open_store(store_path, read_only=True) as store:
        known = [item.key for item in store.list()]
    keys = find_all(known, wanted) if all_matching else (find_one(known, wanted),)
    with open_store(store_path) as store:  # before the question: who may not write need not answer it
        names = "\n".join(f"  {key}" for key in keys)
        if not yes and not click.confirm(f"Remove\n{names}\nand the history?"):
            click.echo("Nothing was removed.", err=True)
            click.get_current_context().exit(1)
        for key in keys:
            if store.remove(key, author("rm")):
                click.echo(f"removed {key}")
