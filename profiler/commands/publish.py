"""`muri profile publish`: a user's profile, with what else is known of it, becomes one of all users; and the reverse.

A published profile is a copy, so a user who measures a model again changes nothing for others.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import click

from muri.profiler.commands.stored import (
    author,
    complete_gpu_type,
    complete_model,
    open_store,
    store_option,
    user_option,
)
from muri.profiler.errors import NoSuchProfileError, NotPublishableError
from muri.profiler.estimates import FEATURES
from muri.profiler.interference import FITS, PAIRS, Interference, computation_name, known_pairs, to_document
from muri.profiler.lookup import Wanted, find_all, find_one
from muri.profiler.records import Document, ProfileKey
from muri.profiler.sensitivity import SENSITIVITIES
from muri.profiler.store import ACCUMULATES, Author, ProfileStore

FROM: Final = "published_from"
"""In the body of a published document: the user whose document it is a copy of."""

KINDS: Final = (ACCUMULATES, SENSITIVITIES, FITS, PAIRS, FEATURES)
"""Kinds of documents that say something of a model."""


_NAMES: Final[tuple[tuple[str, Callable[[ProfileKey], str]], ...]] = (
    (ACCUMULATES, str),
    (SENSITIVITIES, str),
    (SENSITIVITIES, lambda key: key.name),
    (FITS, computation_name),
    (FEATURES, str),
)
"""The names under which documents of a kind are kept of a key; pairs have two keys."""


@click.command("publish", short_help="Make users' profiles valid for all users, or take them back.")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...", shell_complete=complete_model)
@click.option("--withdraw", "take_back", is_flag=True, help="Take published profiles back.")
@click.option("--batch-size", type=click.IntRange(0), help="Only of this batch size (0: not known).")
@click.option("--gpus", "gpu_count", type=click.IntRange(1), help="Only of jobs with so many GPUs.")
@click.option("--gpu-type", shell_complete=complete_gpu_type, help="Only of this GPU type.")
@user_option("Only of this user.")
@click.option("--all-matching", is_flag=True, help="All that match, not only one of each MODEL.")
@click.option("-y", "--yes", is_flag=True, help="Don't ask.")
@store_option
def publish_command(
    models: tuple[str, ...], take_back: bool, store_path: Path | None, user: str | None, all_matching: bool, yes: bool,
    **which: Any,
) -> None:  # fmt: skip
    """Make the profiles of MODEL... valid for all users, with what else is known of these models.

    A job is planned with its user's own profile first, then with a published one of the same model,
    batch size, GPU count and GPU type. A published profile is a copy: later measurements of its user
    change nothing for others. --withdraw takes it back; users keep their own profiles, and jobs of a
    user who has none of such a model are measured again.

    \b
    Examples:
      muri profile publish resnet18 --user alice
      muri profile publish resnet18 bert --user alice --all-matching --yes
      muri profile publish resnet18 --withdraw
    """
    if take_back and user is not None:
        raise click.UsageError("--user says whose profile is published; published ones are of all users")
    with open_store(store_path, existing=True) as store:
        every = [item.key for item in store.list()]
        known = every if take_back else [key for key in every if key.user]
        for model in models:
            if not take_back and model in {key.model for key in every} - {key.model for key in known}:
                raise NoSuchProfileError(f"every profile of {model!r} is published already")
        wanted = [Wanted(model, **which, user="" if take_back else user) for model in models]
        found = [find_all(known, each) if all_matching else (find_one(known, each),) for each in wanted]
        keys = tuple(dict.fromkeys(chain.from_iterable(found)))
        verb = "unpublish" if take_back else "publish"
        effect = "and their history" if take_back else "for all users, in place of what is published of them"
        names = "\n".join(f"  {key}" for key in keys)
        if not yes and not click.confirm(f"{verb.capitalize()}\n{names}\n{effect}?", err=True):
            click.echo(f"Nothing was {verb}ed.", err=True)
            click.get_current_context().exit(1)
        if take_back:
            withdraw(store, keys, author("withdraw"))
        else:
            publish(store, keys, author("publish"))
        for key in keys:
            click.echo(f"{verb}ed {key}")


def publish(store: ProfileStore, keys: Sequence[ProfileKey], author: Author) -> None:
    """Make profiles of users valid for all, with what else is known of them.

    Raises:
        NotPublishableError: Two of them would become the same profile.
        StoreError: The store cannot be written.
    """
    _refuse_repeats(keys)
    profiles = [found for key in keys if (found := store.get(key)) is not None]
    store.put_all((replace(each, key=each.key.published) for each in profiles), author)
    copies = tuple(_copies(store, keys))
    split = {document.name for kind, document in copies if kind == ACCUMULATES}
    for key in keys:
        if str(key.published) not in split:  # declared by an earlier script of that name
            store.remove_document(ACCUMULATES, str(key.published))
    for kind, document in copies:
        store.put_document(kind, document)


def withdraw(store: ProfileStore, keys: Sequence[ProfileKey], author: Author) -> None:
    """Take published profiles back, with the documents that were published with them; users keep their own.

    Raises:
        StoreError: The store cannot be written.
    """
    for key in keys:
        store.remove(key, author)
    models = {profile.key.model for profile in store.list() if not profile.key.user}
    for kind in KINDS:
        for document in store.documents(kind):
            if FROM in document.body and any(_is_of(kind, document, key, models) for key in keys):
                store.remove_document(kind, document.name)


def _refuse_repeats(keys: Iterable[ProfileKey]) -> None:
    owners: dict[ProfileKey, ProfileKey] = {}
    for key in keys:
        other = owners.setdefault(key.published, key)
        if other != key:
            raise NotPublishableError(
                f"{other} and {key} would be published as the same profile; say whose with --user"
            )


def _copies(store: ProfileStore, keys: Sequence[ProfileKey]) -> Iterator[tuple[str, Document]]:
    """The documents of users' models under their published names, each with its kind."""
    for kind, name_of in _NAMES:
        owners = {name_of(key): key for key in keys}
        for document in store.documents(kind):
            key = owners.get(document.name)
            if key is not None:
                about = {"key": asdict(key.published)} if kind == FEATURES else {}
                published = Document(name_of(key.published), document.measured_at, {**document.body, **about})
                yield kind, _marked(published, key.user)
    yield from _pairs(store, set(keys))


def _pairs(store: ProfileStore, keys: set[ProfileKey]) -> Iterator[tuple[str, Document]]:
    """Pairs of these keys of which both sides are published by now."""
    public = {profile.key for profile in store.list() if not profile.key.user}
    for pair in known_pairs(store):
        a, b = (replace(side, key=side.key.published) for side in (pair.a, pair.b))
        copy = replace(pair, a=a, b=b)
        if keys.intersection(pair.pair) and public.issuperset(copy.pair):
            users = " and ".join(sorted({key.user for key in pair.pair} - {""}))
            yield PAIRS, _marked(to_document(copy), users)


def _marked(document: Document, user: str) -> Document:
    return document._replace(body={**document.body, FROM: user})


def _is_of(kind: str, document: Document, key: ProfileKey, published_models: set[str]) -> bool:
    """Whether a document says something of a key that is no longer published, and of nothing that still is."""
    if kind == PAIRS:
        return key in Interference.from_dict(document.body).pair
    if document.name == key.model:
        return key.model not in published_models
    return document.name in (str(key), computation_name(key))
