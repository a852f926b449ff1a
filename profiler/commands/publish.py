"""Commands that make users' profiles valid for all users, and take them back: `muri profile publish`, `unpublish`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path

import click

from muri.profiler.commands.options import (
    author,
    complete_gpu_type,
    complete_model,
    echo_json,
    json_option,
    open_store,
    store_option,
    user_option,
)
from muri.profiler.errors import NoSuchProfileError
from muri.profiler.lookup import Wanted, find_all, find_one
from muri.profiler.publishing import publish, withdraw
from muri.profiler.records import ProfileKey


@dataclass(frozen=True, slots=True)
class _Request:
    """Which profiles are meant, and whether to ask."""

    models: tuple[str, ...]
    batch_size: int | None
    gpu_count: int | None
    gpu_type: str | None
    all_matching: bool
    yes: bool

    def keys(self, known: Sequence[ProfileKey], user: str | None) -> tuple[ProfileKey, ...]:
        """The keys that are meant, of those that are known.

        Raises:
            NoSuchProfileError: None of a model, or several without --all-matching.
        """
        wanted = [Wanted(model, self.batch_size, self.gpu_count, self.gpu_type, user) for model in self.models]
        if self.all_matching:
            return tuple(dict.fromkeys(key for each in wanted for key in find_all(known, each)))
        return tuple(dict.fromkeys(find_one(known, each) for each in wanted))

    def confirmed(self, keys: Iterable[ProfileKey], verb: str, effect: str) -> bool:
        """Ask, unless --yes was given."""
        names = "\n".join(f"  {key}" for key in keys)
        if self.yes or click.confirm(f"{verb.capitalize()}\n{names}\n{effect}?", err=True):
            return True
        click.echo(f"Nothing was {verb}ed.", err=True)
        return False


def _request_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add MODEL… and the options that narrow it, handed over as one `request`."""

    @wraps(command)
    def with_request(
        *,
        models: tuple[str, ...],
        batch_size: int | None,
        gpu_count: int | None,
        gpu_type: str | None,
        all_matching: bool,
        yes: bool,
        **others: object,
    ) -> None:
        command(request=_Request(models, batch_size, gpu_count, gpu_type, all_matching, yes), **others)

    decorated: Callable[..., None] = with_request
    for decorate in (
        click.option("-y", "--yes", is_flag=True, help="Don't ask."),
        click.option("--all-matching", is_flag=True, help="All that match, not only one of each MODEL."),
        click.option("--gpu-type", shell_complete=complete_gpu_type, help="Only of this GPU type."),
        click.option("--gpus", "gpu_count", type=click.IntRange(1), help="Only of jobs with so many GPUs."),
        click.option("--batch-size", type=click.IntRange(0), help="Only of this batch size (0: not known)."),
        click.argument("models", nargs=-1, required=True, metavar="MODEL...", shell_complete=complete_model),
    ):
        decorated = decorate(decorated)
    return decorated


@click.command("publish", short_help="Make users' profiles valid for all users.")
@_request_options
@user_option("Only of this user.")
@store_option
@json_option
def publish_command(request: _Request, user: str | None, store_path: Path | None, as_json: bool) -> None:
    """Make the profiles of MODEL... valid for all users, with what else is known of these models.

    A job is planned with its user's own profile first, then with a published one of the same model,
    batch size, GPU count and GPU type. What is published is a copy: later measurements of its user
    change nothing for others. `muri profile unpublish` takes it back.

    \b
    Examples:
      muri profile publish resnet18 --user alice
      muri profile publish resnet18 bert --user alice --all-matching --yes
    """
    with open_store(store_path, existing=True) as store:
        every = [item.key for item in store.list()]
        own = [key for key in every if key.user]
        for model in request.models:
            if any(key.model == model for key in every) and not any(key.model == model for key in own):
                raise NoSuchProfileError(f"every profile of {model!r} is published already")
        keys = request.keys(own, user)
        if not request.confirmed(keys, "publish", "for all users, in place of what is published of them"):
            click.get_current_context().exit(1)
        stored = publish(store, keys, author("publish"))
    if as_json:
        echo_json({"published": [asdict(key) for key in keys], **stored._asdict()})
        return
    for key in keys:
        click.echo(f"published {key}")


@click.command("unpublish", short_help="Take published profiles back.")
@_request_options
@store_option
@json_option
def unpublish_command(request: _Request, store_path: Path | None, as_json: bool) -> None:
    """Take the published profiles of MODEL... back, with what was published with them.

    Users keep their own profiles. Jobs of a user who has none of such a model are measured again.

    \b
    Examples:
      muri profile unpublish resnet18
      muri profile unpublish resnet18 bert --all-matching --yes
    """
    with open_store(store_path, existing=True) as store:
        keys = request.keys([item.key for item in store.list()], "")
        if not request.confirmed(keys, "unpublish", "and their history"):
            click.get_current_context().exit(1)
        withdraw(store, keys, author("unpublish"))
    if as_json:
        echo_json({"unpublished": [asdict(key) for key in keys]})
        return
    for key in keys:
        click.echo(f"unpublished {key}")
