"""`muri profile audit`."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from muri.profiler.commands.edit import changes
from muri.profiler.commands.options import json_option, maybe_wanted_options, open_store, store_option
from muri.profiler.lookup import Wanted
from muri.profiler.upkeep import AuditEntry


@click.command("audit", short_help="Show who changed which profile, and when.")
@maybe_wanted_options
@click.option("--last", type=click.IntRange(1), default=50, show_default=True, help="Show only so many, the newest.")
@store_option
@json_option
def audit_command(wanted: Wanted | None, last: int, store_path: Path | None, as_json: bool) -> None:
    """Show what was changed by hand (edit, rm, import) and which profiles were marked, the newest last.

    Also of profiles that are gone. Measurements are no changes by hand; `muri profile show` has them.

    \b
    Examples:
      muri profile audit
      muri profile audit resnet18 --last 5
      muri profile audit --json | jq '.audit[] | select(.who == "alice")'
    """
    with open_store(store_path, read_only=True) as store:
        entries = [entry for entry in store.audit() if wanted is None or wanted.matches(entry.key)][-last:]
    if as_json:
        click.echo(json.dumps({"audit": [asdict(entry) for entry in entries]}, indent=2, ensure_ascii=False))
    elif not entries:
        click.echo("Nothing was changed by hand.")
    for entry in () if as_json else entries:
        _print(entry)


def _print(entry: AuditEntry) -> None:
    click.echo(f"{entry.at}  {entry.who}  {entry.action}  {entry.key}")
    for line in changes(entry.before, entry.after):
        click.echo(f"    {line}")
