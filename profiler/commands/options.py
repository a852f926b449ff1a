"""What the commands share: options, the store they mean, the terminal."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from muri.profiler.commands.complete import complete_gpu_type, complete_model
from muri.profiler.errors import StoreMissingError
from muri.profiler.lookup import Wanted
from muri.profiler.store import ProfileStore, default_store_path
from muri.profiler.store_connection import exists
from muri.profiler.times import now_text
from muri.profiler.upkeep import Author, user_name

if TYPE_CHECKING:
    from rich.console import Console

Command = TypeVar("Command", bound=Callable[..., Any])


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


def wanted_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add MODEL and the options that narrow it, handed over as one `wanted`."""
    return _with_model(command, required=True)


def maybe_wanted_options(command: Callable[..., None]) -> Callable[..., None]:
    """The same, but MODEL may be left out: `wanted` is None then."""
    return _with_model(command, required=False)


def _with_model(command: Callable[..., None], *, required: bool) -> Callable[..., None]:
    @wraps(command)
    def with_wanted(
        *,
        model: str | None,
        batch_size: int | None,
        gpu_count: int | None,
        gpu_type: str | None,
        **others: object,
    ) -> None:
        if model is None and (batch_size, gpu_count, gpu_type) != (None, None, None):
            raise click.UsageError("--batch-size, --gpus and --gpu-type narrow down a MODEL; name one")
        command(wanted=None if model is None else Wanted(model, batch_size, gpu_count, gpu_type), **others)

    decorated: Callable[..., None] = with_wanted
    for decorate in (
        click.option("--gpu-type", shell_complete=complete_gpu_type, help="Only of this GPU type."),
        click.option("--gpus", "gpu_count", type=click.IntRange(1), help="Only of jobs with so many GPUs."),
        click.option("--batch-size", type=click.IntRange(0), help="Only of this batch size (0: not known)."),
        click.argument("model", required=required, shell_complete=complete_model),
    ):
        decorated = decorate(decorated)
    return decorated


def author(action: str) -> Author:
    """Who runs the command, now, for the audit."""
    return Author(user_name(), now_text(), action)


def open_store(store_path: Path | None, *, read_only: bool = False, existing: bool = False) -> ProfileStore:
    """The store that a command means.

    Args:
        store_path: As given with --store.
        read_only: Open it only to read.
        existing: Don't make it: the command changes what is in it, and a path that is mistyped should be heard of.

    Raises:
        StoreMissingError: There is none, and none is made.
    """
    path = store_path or default_store_path()
    if existing and not exists(path):
        raise StoreMissingError(path)
    return ProfileStore(path, read_only=read_only)


def open_if_any(store_path: Path | None, *, missing_ok: bool = False) -> ProfileStore | None:
    """The store to read; None where nothing was measured yet, which is no error unless --store names a file.

    Args:
        store_path: As given with --store.
        missing_ok: It is no error there either.
    """
    try:
        return open_store(store_path, read_only=True)
    except StoreMissingError:
        if store_path is not None and not missing_ok:
            raise
        return None


def console() -> "Console":
    """Where tables and bars go."""
    from rich.console import Console  # -- rich takes a while to load

    return Console(highlight=False)
