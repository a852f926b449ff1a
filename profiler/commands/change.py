"""Commands that change what is stored: `muri profile set`, `rm`, `export` and `import`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click

from muri.errors import UsageError
from muri.profiler.commands.options import (
    author,
    echo_json,
    json_option,
    open_store,
    store_option,
    wanted_options,
)
from muri.profiler.errors import ExchangeError
from muri.profiler.exchange import from_json, to_dict, to_json
from muri.profiler.lookup import Wanted, find_all, find_one
from muri.profiler.records import STAGES, ProfileDetail, StageProfile


class EditError(UsageError):
    """The new figures contradict each other, or none is given."""


FIGURES: Final = ("load_ms", "preprocess_ms", "propagate_ms", "synchronize_ms", "iteration_ms", "gpu_mem_gib")


@click.command("set", short_help="Correct a profile's figures by hand.")
@wanted_options
@click.argument("figures", nargs=-1, required=True, metavar="FIGURE=VALUE...")
@store_option
@json_option
def set_command(wanted: Wanted, figures: tuple[str, ...], store_path: Path | None, as_json: bool) -> None:
    """Correct figures of MODEL's profile; the old ones stay in its history.

    FIGURE is load_ms, preprocess_ms, propagate_ms or synchronize_ms: milliseconds per iteration that storage, the CPU,
    the GPU or the network owns; iteration_ms: those of a whole iteration; or gpu_mem_gib: its peak GPU memory. The
    profile's source becomes "edit".

    \b
    Examples:
      muri profile set resnet18 gpu_mem_gib=5.5
      muri profile set resnet18 --batch-size 64 load_ms=120 iteration_ms=480
    """
    edit, by = Edit(**dict(map(_figure_of, figures))), author("set")
    with open_store(store_path, existing=True) as store:
        key = find_one((item.key for item in store.list()), wanted)
        old = store.history(key)[0]
        new = edited(old, edit, by.at)
        store.put_all((new,), by)
    before, after = to_dict(old), to_dict(new)
    if as_json:
        echo_json({"before": before, "after": after})
        return
    click.echo(str(key))
    for line in changed_figures(before, after):
        click.echo(f"  {line}")


def _figure_of(text: str) -> tuple[str, float]:
    """Return the name and the value that a FIGURE=VALUE says."""
    name, _, value = text.partition("=")
    if name not in FIGURES:
        raise EditError(f"{text!r} is not FIGURE=VALUE; figures are {', '.join(FIGURES)}")
    try:
        return name, float(value)
    except ValueError as error:
        raise EditError(f"{name} must be a number, not {value!r}") from error


def changed_figures(before: dict[str, Any] | None, after: dict[str, Any] | None) -> list[str]:
    """What differs between two exports of a profile, a line for each figure that people look at."""
    old, new = before or {}, after or {}
    skip = {"measured_at", "detail", "model", "batch_size", "gpu_count", "gpu_type", "user"}
    names = [name for name in {**old, **new} if name not in skip and old.get(name) != new.get(name)]
    return [f"{name}: {_figure(old.get(name))} → {_figure(new.get(name))}" for name in names]


def _figure(value: object) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Edit:
    """New figures of a profile; None keeps the old one.

    Attributes:
        load_ms: Milliseconds per iteration that storage owns.
        preprocess_ms: Milliseconds per iteration that the CPU owns.
        propagate_ms: Milliseconds per iteration that the GPU owns.
        synchronize_ms: Milliseconds per iteration that the network owns.
        iteration_ms: Milliseconds of a whole iteration.
        gpu_mem_gib: Peak GPU memory.
    """

    load_ms: float | None = None
    preprocess_ms: float | None = None
    propagate_ms: float | None = None
    synchronize_ms: float | None = None
    iteration_ms: float | None = None
    gpu_mem_gib: float | None = None

    def times_s(self) -> dict[str, float]:
        """The times that change, by field of `StageProfile`."""
        given = {name: getattr(self, f"{name}_ms") for name in (*STAGES, "iteration")}
        return {f"{name}_s": value / 1000 for name, value in given.items() if value is not None}


def edited(profile: StageProfile, edit: Edit, now: str) -> StageProfile:
    """The profile with the new figures, its source "edit".

    The other measurements of times (spread, hidden use, confidence) do not fit changed times; they are dropped.

    Raises:
        EditError: A stage would take longer than its iteration.
        ProfileError: A figure cannot be true.
    """
    times = edit.times_s()
    memory = profile.gpu_mem_gib if edit.gpu_mem_gib is None else edit.gpu_mem_gib
    detail = _without_times(profile.detail) if times else profile.detail
    changes: dict[str, Any] = {**times, "gpu_mem_gib": memory, "detail": detail}
    new = replace(profile, **changes, source="edit", measured_at=now)
    longest_s = max(new.stage_s)
    if longest_s > new.iteration_s:
        raise EditError(
            f"a stage would take {1000 * longest_s:g} ms of an iteration of {1000 * new.iteration_s:g} ms; "
            "correct the iteration too, with iteration_ms=…"
        )
    return new


def _without_times(detail: ProfileDetail) -> ProfileDetail:
    return ProfileDetail(
        host_mem_gib=detail.host_mem_gib,
        cpu_cores=detail.cpu_cores,
        gpu_utilisation=detail.gpu_utilisation,
        gradient_mib=detail.gradient_mib,
        dangers=detail.dangers,
    )


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


@click.command("export", short_help="Print all profiles as JSON.")
@store_option
def export_command(store_path: Path | None) -> None:
    """Print all profiles as JSON, for `muri profile import` elsewhere.

    \b
    Examples:
      muri profile export > profiles.json
      muri profile export --store /tmp/profiles.db > profiles.json
    """
    with open_store(store_path, read_only=True) as store:
        click.echo(to_json(store.list()), nl=False)


@click.command("import", short_help="Read profiles from a JSON export.")
@click.argument("file", type=click.Path(allow_dash=True, path_type=Path))
@store_option
def import_command(file: Path, store_path: Path | None) -> None:
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
