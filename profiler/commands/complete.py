"""Names from the store for the shell's completion; silent about every error, for the shell has no place for them."""

import shlex
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from muri.errors import MuriError
from muri.profiler.records import ProfileKey
from muri.profiler.store import ProfileStore, default_store_path


def complete_model(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The models in the store that begin so."""
    models = sorted({key.model for key in _keys(context)})
    # The shells' functions put what they are given into the line as it is: blanks and quotes would break it.
    plain = (model for model in models if shlex.quote(model) == model)
    return [CompletionItem(model) for model in plain if model.startswith(incomplete)]


def complete_gpu_type(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The GPU types in the store that begin so."""
    types = sorted({key.gpu_type for key in _keys(context)})
    return [CompletionItem(gpu_type) for gpu_type in types if gpu_type.startswith(incomplete)]


def _keys(context: click.Context) -> list[ProfileKey]:
    path = Path(context.params.get("store_path") or default_store_path())
    try:
        with ProfileStore(path, read_only=True) as store:
            return [profile.key for profile in store.list()]
    except MuriError:
        return []
