"""Commands that only read the store: `muri profile list`, `show`, `compare`, `stats` and `audit`."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
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
    maybe_wanted_options,
    open_store,
    read_if_any,
    store_option,
    user_option,
    wanted_options,
    why_none,
)
from muri.profiler.differences import compare
from muri.profiler.errors import NoSuchProfileError
from muri.profiler.exchange import to_dict, to_json
from muri.profiler.lookup import PUBLISHED, SORTS, Filter, Wanted, find_one, listed, selected
from muri.profiler.records import RESOURCES, SOURCES, StageProfile
from muri.profiler.store import ProfileStore, StoreStats, stats_of
from muri.profiler.upkeep import changed_figures
from muri.utc import age


@click.command("list", short_help="List profiles, sorted and filtered.")
@click.option("--sort", type=click.Choice(tuple(SORTS)), default="model", show_default=True, help="Order.")
@click.option("--reverse", is_flag=True, help="Reverse the order.")
@click.option("--model", shell_complete=complete_model, help="Only this model; * and ? stand for any letters.")
@click.option("--batch-size", type=click.IntRange(0), help="Only of this batch size (0: not known).")
@click.option("--gpus", "gpu_count", type=click.IntRange(1), help="Only of jobs with so many GPUs.")
@click.option("--gpu-type", shell_complete=complete_gpu_type, help="Only of this GPU type.")
@click.option("--source", type=click.Choice(SOURCES), help="Only from this source.")
@click.option("--bottleneck", type=click.Choice(RESOURCES), help="Only where this resource is held longest.")
@click.option("--stale", is_flag=True, help="Only what is to be measured again.")
@user_option(f"Only of this user; {PUBLISHED}: published for all.")
@store_option
@json_option
def list_command(sort: str, reverse: bool, store_path: Path | None, as_json: bool, **wanted: Any) -> None:
    """List profiles.

    The newest, longest, largest and least sure come first. ~ marks an estimate, ! a profile that is
    to be measured again. Who may not change the store sees his own profiles and published ones.

    \b
    Examples:
      muri profile list --sort iteration
      muri profile list --model 'resnet*' --gpu-type a100 --bottleneck cpu
      muri profile list --stale --sort age --reverse
      muri profile list --json | jq -r '.profiles[].model'
    """
    stored = read_if_any(store_path, ProfileStore.list)
    stale = frozenset(mark.key for mark in read_if_any(store_path, ProfileStore.stale_marks))
    profiles = listed(stored, Filter(**wanted), stale, sort, reverse=reverse)
    if as_json:
        click.echo(to_json(profiles), nl=False)
    elif profiles:
        from muri.profiler.render import print_table  # rich takes a while to load

        print_table(console(), profiles, datetime.now(UTC), stale)
    elif stored:
        click.echo(f"None of the {len(stored)} profiles matches.")
    else:
        click.echo(why_none(store_path))


@click.command("show", short_help="Show a profile with its stages as bars.")
@wanted_options
@store_option
@json_option
def show_command(wanted: Wanted, store_path: Path | None, as_json: bool) -> None:
    """Show the profile of MODEL: the iteration and its stages as bars, and all other measurements.

    A stage owns the time in which its resource is used most. The light part of its bar says how long
    the resource is busy while another one owns the time.

    \b
    Examples:
      muri profile show resnet18
      muri profile show resnet18 --batch-size 64 --gpus 2 --gpu-type a100
      muri profile show resnet18 --json
    """
    with open_store(store_path, read_only=True) as store:
        key = find_one((item.key for item in store.list()), wanted)
        history = store.history(key)
        stale = next((mark for mark in store.stale_marks() if mark.key == key), None)
    if as_json:
        document = to_dict(history[0]) | {"history": [to_dict(item) for item in history[1:]]}
        document |= {"stale": None if stale is None else {"since": stale.since, "reason": stale.reason}}
        echo_json(document)
        return
    from muri.profiler.render import print_profile

    print_profile(console(), history, datetime.now(UTC), stale)


@click.command("compare", short_help="Show two profiles side by side.")
@click.argument("first", metavar="A", shell_complete=complete_model)
@click.argument("second", metavar="B", shell_complete=complete_model)
@store_option
@json_option
def compare_command(first: str, second: str, store_path: Path | None, as_json: bool) -> None:
    """Show the profiles A and B side by side, with ratios.

    Each is MODEL[:BATCH[:GPUS[:TYPE[:USER]]]]; a part that is left out or empty matches anything, as long
    as only one profile matches in all; the user "all" means a published one. Two means differ beyond
    noise when they are more than three standard errors apart, by the coefficients of variation that the
    dry runs measured.

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
        echo_json({"a": to_dict(one), "b": to_dict(other), "rows": [row._asdict() for row in rows]})
        return
    from muri.profiler.render import print_comparison

    print_comparison(console(), one, other, rows, datetime.now(UTC))


def _newest(store: ProfileStore, text: str) -> StageProfile:
    key = selected((item.key for item in store.list()), text)
    profile = store.get(key)
    if profile is None:
        raise NoSuchProfileError(f"the profile of {key} has just been removed; try again")
    return profile


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
        echo_json(asdict(stats))
        return
    for name, value in _stats_lines(stats):
        click.echo(f"{name:<14}{value}")


def _stats_lines(stats: StoreStats) -> Iterator[tuple[str, str]]:
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


@click.command("audit", short_help="Show who changed which profile, and when.")
@maybe_wanted_options
@click.option("--last", type=click.IntRange(1), default=50, show_default=True, help="How many to show, the newest.")
@store_option
@json_option
def audit_command(wanted: Wanted | None, last: int, store_path: Path | None, as_json: bool) -> None:
    """Show what people changed by hand (edit, rm, import) and which profiles were marked, the newest last.

    Changes of removed profiles are shown too; measurements are not: `muri profile show` has them.

    \b
    Examples:
      muri profile audit
      muri profile audit resnet18 --last 5
      muri profile audit --json | jq '.audit[] | select(.who == "alice")'
    """
    with open_store(store_path, read_only=True) as store:
        entries = [entry for entry in store.audit() if wanted is None or wanted.matches(entry.key)][-last:]
    if as_json:
        echo_json({"audit": [asdict(entry) for entry in entries]})
        return
    if not entries:
        click.echo("Nothing was changed by hand.")
    for entry in entries:
        click.echo(f"{entry.at}  {entry.who}  {entry.action}  {entry.key}")
        for line in changed_figures(entry.before, entry.after):
            click.echo(f"    {line}")
