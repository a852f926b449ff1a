"""`muri profile stats`."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click

from muri.profiler.commands.options import json_option, open_store, store_option
from muri.profiler.store_stats import StoreStats, stats_of
from muri.profiler.times import age


@click.command("stats", short_help="Count profiles, measurements and marks.")
@store_option
@json_option
def stats_command(store_path: Path | None, as_json: bool) -> None:
    """Count what the store holds: profiles, measurements by source, GPU types, stale marks.

    \b
    Examples:
      muri profile stats
      muri profile stats --json | jq .stale
    """
    with open_store(store_path, read_only=True) as store:
        stats = stats_of(store)
    if as_json:
        click.echo(json.dumps(asdict(stats), indent=2, ensure_ascii=False))
        return
    for name, value in _lines(stats):
        click.echo(f"{name:<14}{value}")


def _lines(stats: StoreStats) -> Iterator[tuple[str, str]]:
    now = datetime.now(UTC)
    yield "store", stats.path
    yield "size", f"{stats.file_mib:.2f} MiB, journal {stats.journal}"
    yield "profiles", f"{stats.profiles} of {stats.models} models, {stats.estimates} estimated"
    yield "stale", str(stats.stale)
    yield "measurements", _counts(stats.measurements)
    yield "GPU types", _counts(stats.gpu_types)
    yield "dry runs", f"{stats.dry_runs_saved} saved: jobs that started with a profile of another one's dry run"
    if stats.newest:
        yield "measured", f"{age(stats.oldest, now)} to {age(stats.newest, now)} ago"
    yield "by hand", f"{stats.changes_by_hand} changes and marks (muri profile audit)"
    for path in stats.damaged:
        yield "set aside", path


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
