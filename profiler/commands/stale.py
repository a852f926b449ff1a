"""`muri profile stale`."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click

from muri.profiler.commands.options import (
    author,
    json_option,
    maybe_wanted_options,
    open_if_any,
    open_store,
    store_option,
)
from muri.profiler.lookup import Wanted, find_one
from muri.profiler.times import age
from muri.profiler.upkeep import StaleMark


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
    controller marks by itself what has drifted: running jobs differ by more than 20 % for long.

    \b
    Examples:
      muri profile stale
      muri profile stale resnet18 --batch-size 64 --reason "new data loader"
      muri profile stale resnet18 --batch-size 64 --clear
    """
    if wanted is None:
        if reason is not None or clear:
            raise click.UsageError("--reason and --clear need a MODEL")
        _list(store_path, as_json)
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


def _list(store_path: Path | None, as_json: bool) -> None:
    marks = _marks(store_path)
    if as_json:
        click.echo(json.dumps({"stale": [_plain(mark) for mark in marks]}, indent=2, ensure_ascii=False))
        return
    if not marks:
        click.echo("No profile is stale.")
        return
    for mark in marks:
        click.echo(f"{mark.key}\n  {mark.reason}\n  {age(mark.since, datetime.now(UTC))} ago, by {mark.who}")


def _marks(store_path: Path | None) -> tuple[StaleMark, ...]:
    store = open_if_any(store_path)
    if store is None:
        return ()
    with store:
        return store.stale_marks()


def _plain(mark: StaleMark) -> dict[str, object]:
    return {**asdict(mark.key), "since": mark.since, "reason": mark.reason, "who": mark.who}
