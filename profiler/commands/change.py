"""Commands that change what is stored: `muri profile edit`, `stale`, `rm`, `export` and `import`."""

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import click

from muri.files import whole_file
from muri.profiler.commands.options import (
    author,
    echo_json,
    json_option,
    maybe_wanted_options,
    open_store,
    read_if_any,
    store_option,
    wanted_options,
)
from muri.profiler.errors import ExchangeError
from muri.profiler.exchange import from_json, to_dict, to_json
from muri.profiler.lookup import Wanted, find_all, find_one
from muri.profiler.records import StageProfile
from muri.profiler.store import ProfileStore
from muri.profiler.upkeep import Edit, StaleMark, changed_figures, edited
from muri.utc import age


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

    The profile's source becomes "edit"; `muri profile audit` shows who changed what, and when.

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
        echo_json({"before": before, "after": after})
        return
    click.echo(str(key))
    for line in changed_figures(before, after):
        click.echo(f"  {line}")


@click.command("stale", short_help="List, set or take back marks to measure again.")
@maybe_wanted_options
@click.option("--reason", help="Mark the profile, for this reason.")
@click.option("--clear", is_flag=True, help="Take the mark back.")
@store_option
@json_option
def stale_command(
    wanted: Wanted | None, reason: str | None, clear: bool, store_path: Path | None, as_json: bool
) -> None:
    """List the profiles that are marked as stale; with MODEL and --reason mark one, with --clear unmark it.

    A marked profile serves planning until the next job of its model has been measured again. The
    controller itself marks a profile that has drifted: its running jobs differ by over 20 % for long.

    \b
    Examples:
      muri profile stale
      muri profile stale resnet18 --batch-size 64 --reason "new data loader"
      muri profile stale resnet18 --batch-size 64 --clear
    """
    if wanted is None:
        if reason is not None or clear:
            raise click.UsageError("--reason and --clear need a MODEL")
        _list_marks(store_path, as_json)
        return
    if (reason is None) != clear:
        raise click.UsageError('say one of --reason "…" to mark it and --clear to take the mark back')
    if reason is not None and not reason.strip():
        raise click.UsageError("--reason is empty; say why, for those who read the list")
    with open_store(store_path, existing=True) as store:
        key = find_one((item.key for item in store.list()), wanted)
        if reason is None:
            changed = store.clear_stale(key, author("clear"))
        else:
            changed = store.mark_stale(key, reason, author("stale"))
    if as_json:
        click.echo(json.dumps({"key": asdict(key), "stale": not clear, "changed": changed}, ensure_ascii=False))
    elif clear:
        click.echo(f"{key}: the mark is taken back" if changed else f"{key} was not marked")
    else:
        click.echo(f"{key}: the next job of it is measured again" if changed else f"{key} was marked already")


def _list_marks(store_path: Path | None, as_json: bool) -> None:
    marks = read_if_any(store_path, ProfileStore.stale_marks)
    if as_json:
        echo_json({"stale": [_plain(mark) for mark in marks]})
        return
    if not marks:
        click.echo("No profile is stale.")
        return
    for mark in marks:
        click.echo(f"{mark.key}\n  {mark.reason}\n  {age(mark.since, datetime.now(UTC))} ago, by {mark.who}")


def _plain(mark: StaleMark) -> dict[str, object]:
    return {**asdict(mark.key), "since": mark.since, "reason": mark.reason, "who": mark.who}


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
    with open_store(store_path) as store:  # before the question: a user who may not write need not answer it
        names = "\n".join(f"  {key}" for key in keys)
        if not yes and not click.confirm(f"Remove\n{names}\nand the history?"):
            click.echo("Nothing was removed.", err=True)
            click.get_current_context().exit(1)
        for key in keys:
            if store.remove(key, author("rm")):
                click.echo(f"removed {key}")


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
        with whole_file(output) as draft:
            draft.write_text(to_json(profiles), encoding="utf-8")
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
    profiles = from_json(_read_file(file), name)
    with open_store(store_path) as store:
        stored = store.put_all((_imported(item) for item in profiles), author("import"))
    if as_json:
        click.echo(json.dumps(stored._asdict()))
    else:
        click.echo(f"{stored.added} added, {stored.replaced} replaced")


def _imported(item: StageProfile) -> StageProfile:
    """The profile as an imported one; moving an estimate does not make it a measurement."""
    return item if item.is_estimate else replace(item, source="import")


def _read_file(file: Path) -> str:
    try:
        with click.open_file(str(file), encoding="utf-8") as stream:  # knows that - is the standard input
            return str(stream.read())
    except OSError as error:
        raise ExchangeError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ExchangeError(f"{file}: not UTF-8 text (byte {error.start})") from error
