"""Publishing: a user's profile, with what else is known of it, becomes valid for all users; and the reverse.

What is published is a copy, so a user who measures his model again changes nothing for others.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Final, NamedTuple

from muri.profiler.errors import NotPublishableError
from muri.profiler.interference.models import KIND as FITS
from muri.profiler.interference.models import computation_name
from muri.profiler.interference.ratios import KIND as PAIRS
from muri.profiler.interference.ratios import Interference, Side, known_pairs, to_document
from muri.profiler.prediction.features import KIND as FEATURES
from muri.profiler.records import ProfileKey
from muri.profiler.sensitivity.record import KIND as SENSITIVITIES
from muri.profiler.store import ACCUMULATES, Document, ProfileStore, Stored
from muri.profiler.upkeep import Author

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


class Copy(NamedTuple):
    """A document to be stored."""

    kind: str
    document: Document


def publish(store: ProfileStore, keys: Sequence[ProfileKey], author: Author) -> Stored:
    """Make profiles of users valid for all, with what else is known of them.

    Args:
        store: Open for writing.
        keys: Whose; each with a profile of its user.
        author: Who publishes them, for the audit.

    Raises:
        NotPublishableError: Two of them would become the same profile.
        StoreError: The store cannot be written.
    """
    _refuse_repeats(keys)
    profiles = [found for key in keys if (found := store.get(key)) is not None]
    stored = store.put_all((replace(each, key=each.key.published) for each in profiles), author)
    copies = tuple(_copies(store, keys))
    split = {each.document.name for each in copies if each.kind == ACCUMULATES}
    for key in keys:
        if str(key.published) not in split:  # what an earlier script of that name declared
            store.remove_document(ACCUMULATES, str(key.published))
    for kind, document in copies:
        store.put_document(kind, document)
    return stored


def withdraw(store: ProfileStore, keys: Sequence[ProfileKey], author: Author) -> int:
    """Take published profiles back, with the documents that were published with them; users keep their own.

    Args:
        store: Open for writing.
        keys: Published ones.
        author: Who withdraws them, for the audit.

    Returns:
        How many there were.

    Raises:
        StoreError: The store cannot be written.
    """
    gone = sum(store.remove(key, author) for key in keys)
    models = {profile.key.model for profile in store.list() if not profile.key.user}
    for kind in KINDS:
        for document in store.documents(kind):
            if FROM in document.body and any(_is_of(kind, document, key, models) for key in keys):
                store.remove_document(kind, document.name)
    return gone


def _refuse_repeats(keys: Iterable[ProfileKey]) -> None:
    owners: dict[ProfileKey, ProfileKey] = {}
    for key in keys:
        other = owners.setdefault(key.published, key)
        if other != key:
            raise NotPublishableError(
                f"{other} and {key} would be published as the same profile; say whose with --user"
            )


def _copies(store: ProfileStore, keys: Sequence[ProfileKey]) -> Iterator[Copy]:
    """The documents of users' models, under their published names."""
    for kind, name_of in _NAMES:
        owners = {name_of(key): key for key in keys}
        for document in store.documents(kind):
            key = owners.get(document.name)
            if key is not None:
                about = {"key": asdict(key.published)} if kind == FEATURES else {}
                published = Document(name_of(key.published), document.measured_at, {**document.body, **about})
                yield Copy(kind, _marked(published, key.user))
    yield from _pairs(store, set(keys))


def _pairs(store: ProfileStore, keys: set[ProfileKey]) -> Iterator[Copy]:
    """Pairs of these keys of which both sides are published by now."""
    public = {profile.key for profile in store.list() if not profile.key.user}
    for pair in known_pairs(store):
        copy = replace(pair, a=_public_side(pair.a), b=_public_side(pair.b))
        if keys.intersection(pair.pair) and public.issuperset(copy.pair):
            users = " and ".join(sorted({key.user for key in pair.pair} - {""}))
            yield Copy(PAIRS, _marked(to_document(copy), users))


def _public_side(side: Side) -> Side:
    return replace(side, key=side.key.published)


def _marked(document: Document, user: str) -> Document:
    return document._replace(body={**document.body, FROM: user})


def _is_of(kind: str, document: Document, key: ProfileKey, published_models: set[str]) -> bool:
    """Whether a document says something of a key that is no longer published, and of nothing that still is."""
    if kind == PAIRS:
        return key in Interference.from_dict(document.body).pair
    if document.name == key.model:
        return key.model not in published_models
    return document.name in (str(key), computation_name(key))
