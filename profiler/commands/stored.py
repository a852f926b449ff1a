"""Commands on what is stored: `muri profile list`, `show`, `set`, `rm`, `export` and `import`."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from muri.errors import UsageError
from muri.profiler.commands.options import (
    author,
    complete_gpu_type,
    complete_model,
    console,
    echo_json,
    json_option,
    open_store,
    read_if_any,
    store_option,
    user_option,
    wanted_options,
    why_none,
)
from muri.profiler.errors import ExchangeError, NoSuchProfileError
from muri.profiler.exchange import from_json, to_dict, to_json
from muri.profiler.lookup import PUBLISHED, SORTS, Filter, Wanted, find_all, find_one, listed
from muri.profiler.records import ProfileDetail, ProfileKey, StageProfile, owned_name
from muri.profiler.sensitivity import SENSITIVITIES, SensitivityProfile
from muri.profiler.store import ProfileStore, StaleMark


@click.command("list", short_help="List profiles, sorted and filtered.")
@click.option("--sort", type=click.Choice(tuple(SORTS)), default="model", show_default=True, help="Order.")
@click.option("--model", shell_complete=complete_model, help="Only this model; * and ? stand for any letters.")
@click.option("--gpu-type", shell_complete=complete_gpu_type, help="Only of this GPU type.")
@user_option(f"Only of this user; {PUBLISHED}: published for all.")
@store_option
@json_option
def list_command(sort: str, store_path: Path | None, as_json: bool, **wanted: Any) -> None:
    """List profiles, and why some are to be measured again.

    The newest, longest, largest and least sure come first. ~ marks an estimate, ! a profile that is
    to be measured again. Who may not change the store sees his own profiles and published ones.

    \b
    Examples:
      muri profile list --sort iteration
      muri profile list --model 'resnet*' --gpu-type a100
      muri profile list --json | jq -r '.profiles[].model'
    """
    stored = read_if_any(store_path, ProfileStore.list)
    profiles = listed(stored, Filter(**wanted), sort)
    if as_json:
        click.echo(to_json(profiles), nl=False)
    elif profiles:
        from muri.profiler.render import print_table  # rich takes a while to load

        shown, known = {profile.key for profile in profiles}, {profile.key for profile in stored}
        marks = read_if_any(store_path, ProfileStore.stale_marks)
        print_table(console(), profiles, datetime.now(UTC), [mark for mark in marks if _doubted(mark, known) in shown])
    elif stored:
        click.echo(f"None of the {len(stored)} profiles matches.")
    else:
        click.echo(why_none(store_path))


def sweep_of(store: ProfileStore, name: str) -> SensitivityProfile | None:
    """Return the stored sensitivity of a job, None without one (SensitivityError: it cannot be read)."""
    documents = (document for document in store.documents(SENSITIVITIES) if document.name == name)
    return next(map(SensitivityProfile.from_document, documents), None)


def _doubted(mark: StaleMark, known: Collection[ProfileKey]) -> ProfileKey | None:
    """Return the profile that serves the jobs of a mark: their user's own, else the published one."""
    return next((key for key in mark.key.lookup_order if key in known), None)


@click.command("show", short_help="Show a profile with its stages as bars.")
@wanted_options
@store_option
@json_option
def show_command(store_path: Path | None, as_json: bool, **given: Any) -> None:
    """Show the profile of MODEL: the iteration and its stages as bars, and all other measurements.

    A stage owns the time in which its resource is used most. The light part of its bar says how long
    the resource is busy while another one owns the time. A sweep over the CPUs and memory of MODEL
    follows below (`muri profile run --sweep`, and dry runs under policy synergy).

    \b
    Examples:
      muri profile show resnet18
      muri profile show resnet18 --batch-size 64 --gpus 2 --gpu-type a100
      muri profile show resnet18 --json
    """
    wanted = Wanted(**given)
    with open_store(store_path, read_only=True) as store:
        known = [item.key for item in store.list()]
        history: tuple[StageProfile, ...] = ()
        sweep = sweep_of(store, owned_name(wanted.model, wanted.user or ""))
        try:
            key = find_one(known, wanted)
        except NoSuchProfileError:
            if sweep is None or any(each.model == wanted.model for each in known):
                raise
            stale = None  # only a sweep has been made
        else:
            history = store.history(key)
            sweep = sweep_of(store, str(key)) or sweep  # of dry runs of this size, else of `profile run --sweep`
            stale = next((mark for mark in store.stale_marks() if _doubted(mark, known) == key), None)
    if as_json:
        document: dict[str, Any] = to_dict(history[0]) if history else {}
        document["history"] = [to_dict(item) for item in history[1:]]
        document["stale"] = stale and {"since": stale.since, "reason": stale.reason, "who": stale.who}
        document["sweep"] = sweep and sweep.to_json()
        echo_json(document)
        return
    from muri.profiler.render import print_profile, print_sensitivity

    if history:
        print_profile(console(), history, datetime.now(UTC), stale)
    if sweep is not None:
        print_sensitivity(console(), sweep)


class EditError(UsageError):
    """The new figures contradict each other, or none is given."""


FIGURES: Final = ("load_ms", "preprocess_ms", "propagate_ms", "synchronize_ms", "iteration_ms", "gpu_mem_gib")


@click.command("set", short_help="Correct a profile's figures by hand.")
@wanted_options
@click.argument("figures", nargs=-1, required=True, metavar="FIGURE=VALUE...")
@store_option
@json_option
def set_command(figures: tuple[str, ...], store_path: Path | None, as_json: bool, **wanted: Any) -> None:
    """Correct figures of MODEL's profile; the old ones stay in its history.

    FIGURE is load_ms, preprocess_ms, propagate_ms or synchronize_ms: milliseconds per iteration that storage, the CPU,
    the GPU or the network owns; iteration_ms: those of a whole iteration; or gpu_mem_gib: its peak GPU memory. The
    profile's source becomes "edit".

    \b
    Examples:
      muri profile set resnet18 gpu_mem_gib=5.5
      muri profile set resnet18 --batch-size 64 load_ms=120 iteration_ms=480
    """
    edit, by = dict(map(_figure_of, figures)), author("set")
    with open_store(store_path, existing=True) as store:
        key = find_one((item.key for item in store.list()), Wanted(**wanted))
        old = store.history(key)[0]
        new = edited(old, edit, by.at)
        store.put_all((new,), by)
    before, after = to_dict(old), to_dict(new)
    if as_json:
        echo_json({"before": before, "after": after})
        return
    click.echo(str(key))
    for name in ("load_s", "preprocess_s", "propagate_s", "synchronize_s", "iteration_s", "gpu_mem_gib", "source"):
        if before[name] != after[name]:
            click.echo(f"  {name}: {_shown(before[name])} → {_shown(after[name])}")


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _figure_of(text: str) -> tuple[str, float]:
    """Return the name and the value that a FIGURE=VALUE says."""
    name, _, value = text.partition("=")
    if name not in FIGURES:
        raise EditError(f"{text!r} is not FIGURE=VALUE; figures are {', '.join(FIGURES)}")
    try:
        return name, float(value)
    except ValueError as error:
        raise EditError(f"{name} must be a number, not {value!r}") from error


def edited(profile: StageProfile, edit: Mapping[str, float], now: str) -> StageProfile:
    """The profile with new figures (of `FIGURES`), its source "edit".

    The other measurements of times (spread, hidden use, confidence) do not fit changed times; they are dropped.

    Raises:
        EditError: A stage would take longer than its iteration.
        ProfileError: A figure cannot be true.
    """
    changes: dict[str, Any] = {f"{name[:-3]}_s": value / 1000 for name, value in edit.items() if name.endswith("_ms")}
    if changes:
        old = profile.detail
        kept = {name: getattr(old, name) for name in ("host_mem_gib", "cpu_cores", "gpu_utilisation", "gradient_mib")}
        changes["detail"] = ProfileDetail(**kept, dangers=old.dangers)
    changes["gpu_mem_gib"] = edit.get("gpu_mem_gib", profile.gpu_mem_gib)
    new = replace(profile, **changes, source="edit", measured_at=now)
    longest_s = max(new.stage_s)
    if longest_s > new.iteration_s:
        raise EditError(
            f"a stage would take {1000 * longest_s:g} ms of an iteration of {1000 * new.iteration_s:g} ms; "
            "correct the iteration too, with iteration_ms=…"
        )
    return new


@click.command("rm", short_help="Remove a profile; its model is measured again.")
@wanted_options
@click.option("--all-matching", is_flag=True, help="Remove all that match, not only one.")
@click.option("-y", "--yes", is_flag=True, help="Don't ask.")
@store_option
def rm_command(all_matching: bool, yes: bool, store_path: Path | None, **given: Any) -> None:
    """Remove the profile of MODEL and its history; the next job of it is measured again.

    \b
    Examples:
      muri profile rm resnet18
      muri profile rm resnet18 --batch-size 64 --yes
      muri profile rm resnet18 --all-matching --yes
    """
    wanted = Wanted(**given)
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
        # Moving an estimate does not make it a measurement.
        stored = store.put_all(
            (item if item.is_estimate else replace(item, source="import") for item in profiles), author("import")
        )
    click.echo(f"{stored.added} added, {stored.replaced} replaced")


def _read_file(file: Path) -> str:
    try:
        with click.open_file(str(file), encoding="utf-8") as stream:  # knows that - is the standard input
            return str(stream.read())
    except OSError as error:
        raise ExchangeError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ExchangeError(f"{file}: not UTF-8 text (byte {error.start})") from error
