"""`muri profile compare`."""

import json
from datetime import UTC, datetime
from pathlib import Path

import click

from muri.profiler.commands.complete import complete_model
from muri.profiler.commands.options import console, json_option, open_store, store_option
from muri.profiler.comparison import compare
from muri.profiler.errors import NoSuchProfileError
from muri.profiler.exchange import to_dict
from muri.profiler.lookup import selected
from muri.profiler.records import StageProfile
from muri.profiler.store import ProfileStore


@click.command("compare", short_help="Show two profiles side by side.")
@click.argument("first", metavar="A", shell_complete=complete_model)
@click.argument("second", metavar="B", shell_complete=complete_model)
@store_option
@json_option
def compare_command(first: str, second: str, store_path: Path | None, as_json: bool) -> None:
    """Show the profiles A and B side by side, with ratios.

    Each is MODEL[:BATCH[:GPUS[:TYPE]]]; what is left out or empty may be anything, as long as only
    one profile matches. Two means differ beyond noise when they are more than three standard errors
    apart, by the coefficients of variation that the dry runs measured.

    \b
    Examples:
      muri profile compare resnet18 vgg16
      muri profile compare resnet18:64:1 resnet18:64:4
      muri profile compare resnet18:::a100 resnet18:::h100 --json
    """
    with open_store(store_path, read_only=True) as store:
        one, other = (_newest(store, text) for text in (first, second))
    rows = compare(one, other)
    if as_json:
        document = {"a": to_dict(one), "b": to_dict(other), "rows": [row._asdict() for row in rows]}
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    from muri.profiler.render_profile import print_comparison  # -- rich takes a while to load

    print_comparison(console(), one, other, rows, datetime.now(UTC))


def _newest(store: ProfileStore, text: str) -> StageProfile:
    key = selected((item.key for item in store.list()), text)
    profile = store.get(key)
    if profile is None:
        raise NoSuchProfileError(f"the profile of {key} has just been removed; try again")
    return profile
