"""Commands on what is stored: `muri profile list`, `show`, `set`, `rm`, `export` and `import`; options of all commands.

The options have completion; with them come the store that a command means, and printing.
"""

import json
import os
import pwd
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.shell_completion import CompletionItem

from muri.clock import now_text
from muri.errors import MuriError, UsageError
from muri.profiler.errors import ExchangeError, NoSuchProfileError, StoreMissingError
from muri.profiler.exchange import from_json, to_dict, to_json
from muri.profiler.lookup import PUBLISHED, SORTS, Wanted, find_all, find_one, listed
from muri.profiler.records import ProfileDetail, ProfileKey, StageProfile, owned_name
from muri.profiler.sensitivity import SENSITIVITIES, SensitivityProfile
from muri.profiler.store import Author, ProfileStore, StaleMark, default_store_path
from muri.profiler.store_file import exists

if TYPE_CHECKING:
    from rich.console import Console

Command = TypeVar("Command", bound=Callable[..., Any])
Item = TypeVar("Item")


def store_option(command: Command) -> Command:
    """Add --store, handed over as `store_path`."""
    return click.option(
        "--store",
        "store_path",
        type=click.Path(dir_okay=False, path_type=Path),
        help="The store's file.  [default: $MURI_PROFILES, or profiles.db in $MURI_STATE_DIR or /var/lib/muri]",
    )(command)


def json_option(command: Command) -> Command:
    """Add --json, handed over as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def wanted_options(command: Command) -> Command:
    """Add MODEL and the options that narrow it, handed over as the fields of a `Wanted`."""
    for decorate in (
        user_option(f"Only of this user; {PUBLISHED}: published for all."),
        click.option("--gpu-type", shell_complete=complete_gpu_type, help="Only of this GPU type."),
        click.option("--gpus", "gpu_count", type=click.IntRange(1), help="Only of jobs with so many GPUs."),
        click.option("--batch-size", type=click.IntRange(0), help="Only of this batch size (0: not known)."),
        click.argument("model", shell_complete=complete_model),
    ):
        command = decorate(command)
    return command


def user_option(text: str) -> Callable[[Command], Command]:
    """Add --user, handed over as `user`: a name, "" for published profiles, None where it is left out."""

    def read(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
        return "" if value == PUBLISHED else value

    return click.option("--user", metavar="NAME", callback=read, help=text)


def author(action: str) -> Author:
    """Who runs the command, now, for the audit."""
    return Author(user_name(), now_text(), action)


def login_name() -> str:
    """Who runs this process."""
    uid = os.geteuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def user_name() -> str:
    """Who runs this process; under sudo, also who called it."""
    name = login_name()
    caller = os.environ.get("SUDO_USER", "")
    return f"{caller} as {name}" if caller and caller != name else name


def open_store(store_path: Path | None, *, read_only: bool = False, existing: bool = False) -> ProfileStore:
    """The store that a command means (StoreMissingError: there is none, and none is made)."""
    path = store_path or _default_path(click.get_current_context())
    if existing and not exists(path):
        raise StoreMissingError(path)
    return ProfileStore(path, read_only=read_only, viewer=_viewer(path) if read_only else None)


def _viewer(path: Path) -> str | None:
    """Whose profiles are shown beside the published ones; None for all, to those who may change them."""
    return None if os.access(path, os.W_OK) else login_name()


def read_if_any(
    store_path: Path | None, read: Callable[[ProfileStore], tuple[Item, ...]], *, missing_ok: bool = False
) -> tuple[Item, ...]:
    """Read from the store; nothing where there is none, as before the first measurement.

    Raises:
        StoreMissingError: --store names no store.
    """
    try:
        with open_store(store_path, read_only=True) as store:
            return read(store)
    except StoreMissingError:
        if store_path is not None and not missing_ok:
            raise
        return ()


def why_none(store_path: Path | None) -> str:
    """Say why there are no profiles to show."""
    path = store_path or _default_path(click.get_current_context())
    when = "a model is measured while its first job trains, or in a dry run (profiling.mode of muri.yaml)"
    if exists(path):
        return f"No profiles in {path} yet: {when}."
    return f"There is no profile store {path} on this machine. The controller keeps one where it runs: {when}."


def refuse_unwritable(store_path: Path | None) -> None:
    """Open the store for writing and close it, before a measurement whose result could not be kept.

    Raises:
        StoreError: The store cannot be written.
    """
    open_store(store_path).close()


def _default_path(context: click.Context) -> Path:
    """The store where --store is not given.

    The command that `muri profile` belongs to may know the site's state directory. It hands it over as the context's
    object: a function, which is asked only where it matters, since it may read a file.
    """
    return default_store_path() if context.obj is None else default_store_path(context.obj)


def echo_json(document: object) -> None:
    """Print a document for people and programs."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def console() -> "Console":
    """Where tables and bars go."""
    from muri.terminal import PlainConsole  # rich takes a while to load

    return PlainConsole()


def complete_model(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The models in the store whose names begin with what was typed."""
    models = sorted({key.model for key in _keys(context)})
    # The shells' functions insert a completion unquoted: blanks and quotes would break the line.
    plain = (model for model in models if shlex.quote(model) == model)
    return [CompletionItem(model) for model in plain if model.startswith(incomplete)]


def complete_gpu_type(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The GPU types in the store whose names begin with what was typed."""
    types = sorted({key.gpu_type for key in _keys(context)})
    return [CompletionItem(gpu_type) for gpu_type in types if gpu_type.startswith(incomplete)]


def _keys(context: click.Context) -> list[ProfileKey]:
    """Every key in the store; none on any error, since a shell that completes a word has no place for messages."""
    path = Path(context.params.get("store_path") or _default_path(context))
    try:
        with ProfileStore(path, read_only=True, viewer=_viewer(path)) as store:
            return [profile.key for profile in store.list()]
    except MuriError:
        return []


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
    profiles = listed(stored, sort, **wanted)
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
        kept = {name: getattr(old, name) for name in ("host_mem_gib", "cpu_cores", "gpu_utilization", "gradient_mib")}
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
