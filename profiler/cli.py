"""The commands `muri profile …`."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from muri.profiler.errors import ExchangeError, StoreMissingError
from muri.profiler.exchange import from_json, to_dict, to_json
from muri.profiler.lookup import Wanted, find_all, find_one
from muri.profiler.records import StageProfile
from muri.profiler.store import ProfileStore, default_store_path

if TYPE_CHECKING:
    from rich.console import Console

Command = TypeVar("Command", bound=Callable[..., Any])


def _store_option(command: Command) -> Command:
    return click.option(
        "--store",
        "store_path",
        type=click.Path(dir_okay=False, path_type=Path),
        help="The store's file.  [default: $MURI_PROFILES, or profiles.db in $MURI_STATE_DIR or /var/lib/muri]",
    )(command)


def _json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def _wanted_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add MODEL and the options that narrow it, handed over as one `wanted`."""

    @wraps(command)
    def with_wanted(
        *,
        model: str,
        batch_size: int | None,
        gpu_count: int | None,
        gpu_type: str | None,
        **others: object,
    ) -> None:
        command(wanted=Wanted(model, batch_size, gpu_count, gpu_type), **others)

    decorated: Callable[..., None] = with_wanted
    for decorate in (
        click.option("--gpu-type", help="Only of this GPU type."),
        click.option("--gpus", "gpu_count", type=click.IntRange(1), help="Only of jobs with so many GPUs."),
        click.option("--batch-size", type=click.IntRange(0), help="Only of this batch size (0: not known)."),
        click.argument("model"),
    ):
        decorated = decorate(decorated)
    return decorated


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def profile() -> None:
    """List, show, move and remove stage profiles.

    A profile says how long one training iteration of a model holds storage, CPU, GPU and
    network. It is measured once, in a dry run of a few seconds, and reused for every later job
    with the same model, batch size, GPU count and GPU type.

    \b
    Examples:
      muri profile list
      muri profile show resnet18 --batch-size 64
      muri profile export > profiles.json
      muri profile rm resnet18 --all-matching --yes
    """


@profile.command("list", short_help="List all profiles.")
@_store_option
@_json_option
def list_command(store_path: Path | None, as_json: bool) -> None:
    """List all profiles.

    \b
    Examples:
      muri profile list
      muri profile list --json | jq -r '.profiles[].model'
    """
    try:
        with _open(store_path, read_only=True) as store:
            profiles = store.list()
    except StoreMissingError:
        if store_path is not None:
            raise
        profiles = ()  # a cluster that has measured nothing yet is no error
    if as_json:
        click.echo(to_json(profiles), nl=False)
    elif profiles:
        from muri.profiler.render import print_table  # noqa: PLC0415 -- rich takes a while to load

        print_table(_console(), profiles, datetime.now(UTC))
    else:
        click.echo("No profiles yet: the first job of a model is measured in a dry run.")


@profile.command("show", short_help="Show a profile with its stages as bars.")
@_wanted_options
@_store_option
@_json_option
def show_command(wanted: Wanted, store_path: Path | None, as_json: bool) -> None:
    """Show the profile of MODEL with its stages as bars.

    \b
    Examples:
      muri profile show resnet18
      muri profile show resnet18 --batch-size 64 --gpus 2 --gpu-type a100
      muri profile show resnet18 --json
    """
    with _open(store_path, read_only=True) as store:
        key = find_one((item.key for item in store.list()), wanted)
        history = store.history(key)
    if as_json:
        document = to_dict(history[0]) | {"history": [to_dict(item) for item in history[1:]]}
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    from muri.profiler.render import print_profile  # noqa: PLC0415 -- rich takes a while to load

    print_profile(_console(), history[0], history, datetime.now(UTC))


@profile.command("rm", short_help="Remove a profile; its model is measured again.")
@_wanted_options
@click.option("--all-matching", is_flag=True, help="Remove all that match, not only one.")
@click.option("-y", "--yes", is_flag=True, help="Don't ask.")
@_store_option
def rm_command(wanted: Wanted, all_matching: bool, yes: bool, store_path: Path | None) -> None:
    """Remove the profile of MODEL and its history; the next job of it is measured again.

    \b
    Examples:
      muri profile rm resnet18
      muri profile rm resnet18 --batch-size 64 --yes
      muri profile rm resnet18 --all-matching --yes
    """
    with _open(store_path, read_only=True) as store:
        known = [item.key for item in store.list()]
    keys = find_all(known, wanted) if all_matching else (find_one(known, wanted),)
    with _open(store_path) as store:  # before the question: who may not write need not answer it
        names = "\n".join(f"  {key}" for key in keys)
        if not yes and not click.confirm(f"Remove\n{names}\nand the history?"):
            click.echo("Nothing was removed.", err=True)
            click.get_current_context().exit(1)
        for key in keys:
            if store.remove(key):
                click.echo(f"removed {key}")


@profile.command("export", short_help="Write all profiles as JSON.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write to this file instead of printing.",
)
@_store_option
def export_command(output: Path | None, store_path: Path | None) -> None:
    """Write all profiles as JSON, for `muri profile import` elsewhere.

    \b
    Examples:
      muri profile export > profiles.json
      muri profile export -o profiles.json --store /tmp/profiles.db
    """
    with _open(store_path, read_only=True) as store:
        profiles = store.list()
    if output is None:
        click.echo(to_json(profiles), nl=False)
        return
    try:
        output.write_text(to_json(profiles), encoding="utf-8")
    except OSError as error:
        raise ExchangeError(f"cannot write {output}: {error.strerror}") from error
    click.echo(f"exported {len(profiles)} to {output}", err=True)


@profile.command("import", short_help="Read profiles from a JSON export.")
@click.argument("file", type=click.Path(allow_dash=True, path_type=Path))
@_store_option
@_json_option
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
    with _open(store_path) as store:
        stored = store.put_all(_imported(item) for item in profiles)
    if as_json:
        click.echo(json.dumps(stored._asdict()))
    else:
        click.echo(f"{stored.added} added, {stored.replaced} replaced")


def _imported(item: StageProfile) -> StageProfile:
    return replace(item, source="import")


def _read(file: Path) -> str:
    try:
        with click.open_file(str(file), encoding="utf-8") as stream:  # knows that - is the standard input
            return str(stream.read())
    except OSError as error:
        raise ExchangeError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ExchangeError(f"{file}: not UTF-8 text (byte {error.start})") from error


def _open(store_path: Path | None, *, read_only: bool = False) -> ProfileStore:
    return ProfileStore(store_path or default_store_path(), read_only=read_only)


def _console() -> "Console":
    from rich.console import Console  # noqa: PLC0415 -- rich takes a while to load

    return Console(highlight=False)
