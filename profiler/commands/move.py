"""`muri profile export` and `muri profile import`."""

import json
from dataclasses import replace
from pathlib import Path

import click

from muri.profiler.commands.options import author, json_option, open_store, store_option
from muri.profiler.errors import ExchangeError
from muri.profiler.exchange import from_json, to_json
from muri.profiler.records import StageProfile


@click.command("export", short_help="Write all profiles as JSON.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write to this file instead of printing.",
)
@store_option
def export_command(output: Path | None, store_path: Path | None) -> None:
    """Write all profiles as JSON, for `muri profile import` elsewhere.

    \b
    Examples:
      muri profile export > profiles.json
      muri profile export -o profiles.json --store /tmp/profiles.db
    """
    with open_store(store_path, read_only=True) as store:
        profiles = store.list()
    if output is None:
        click.echo(to_json(profiles), nl=False)
        return
    try:
        output.write_text(to_json(profiles), encoding="utf-8")
    except OSError as error:
        raise ExchangeError(f"cannot write {output}: {error.strerror}") from error
    click.echo(f"exported {len(profiles)} to {output}", err=True)


@click.command("import", short_help="Read profiles from a JSON export.")
@click.argument("file", type=click.Path(allow_dash=True, path_type=Path))
@store_option
@json_option
def import_command(file: Path, store_path: Path | None, as_json: bool) -> None:
    """Read profiles from FILE, a JSON export; - reads the standard input.

    All are stored or, where one is wrong, none. A profile that is already there is replaced and
    becomes history.

    \b
    Examples:
      muri profile import profiles.json
      ssh other-cluster muri profile export | muri profile import -
    """
    name = "standard input" if str(file) == "-" else str(file)
    profiles = from_json(_read(file), name)
    with open_store(store_path) as store:
        stored = store.put_all((_imported(item) for item in profiles), author("import"))
    if as_json:
        click.echo(json.dumps(stored._asdict()))
    else:
        click.echo(f"{stored.added} added, {stored.replaced} replaced")


def _imported(item: StageProfile) -> StageProfile:
    """As an imported one; an estimate does not become a measurement by being moved."""
    return item if item.is_estimate else replace(item, source="import")


def _read(file: Path) -> str:
    try:
        with click.open_file(str(file), encoding="utf-8") as stream:  # knows that - is the standard input
            return str(stream.read())
    except OSError as error:
        raise ExchangeError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ExchangeError(f"{file}: not UTF-8 text (byte {error.start})") from error
