"""What the commands share: options with their completion, the store they mean, and printing."""

import json
import os
import pwd
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from muri.clock import now_text
from muri.errors import MuriError
from muri.profiler.errors import StoreMissingError
from muri.profiler.lookup import PUBLISHED
from muri.profiler.records import ProfileKey
from muri.profiler.store import Author, ProfileStore, default_store_path
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
