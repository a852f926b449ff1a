"""Features beside the profiles in the store: documents of the kind "features"."""

from typing import Final, NamedTuple

from muri.profiler.prediction.features import FeaturesError, GraphFeatures
from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.store import Document, ProfileStore
from muri.profiler.times import now_text

KIND: Final = "features"


class KnownFeatures(NamedTuple):
    """The features of a key."""

    key: ProfileKey
    features: GraphFeatures


class Example(NamedTuple):
    """A measured profile whose features are known: something to learn from."""

    features: GraphFeatures
    profile: StageProfile

    @property
    def family(self) -> str:
        """What is left out together in cross-validation: the model's name up to the first slash."""
        return self.profile.key.model.partition("/")[0]


def put_features(store: ProfileStore, key: ProfileKey, features: GraphFeatures) -> None:
    """Store the features of a key; earlier ones are replaced."""
    now = now_text()
    about = {"model": key.model, "batch_size": key.batch_size, "gpu_count": key.gpu_count, "gpu_type": key.gpu_type}
    store.put_document(KIND, Document(str(key), now, {"key": about, "features": features.to_dict()}))


def all_features(store: ProfileStore) -> tuple[KnownFeatures, ...]:
    """All features in the store, by key.

    Raises:
        FeaturesError: A document is not what `put_features` writes.
    """
    return tuple(sorted(_decode(document) for document in store.documents(KIND)))


def examples(store: ProfileStore, gpu_type: str, gpu_count: int = 1) -> tuple[Example, ...]:
    """What can be learnt for a GPU type and count: measured profiles with features, by key.

    Raises:
        FeaturesError: A document is not what `put_features` writes.
    """
    features = {known.key: known.features for known in all_features(store)}
    return tuple(
        Example(features[item.key], item)
        for item in store.list()
        if item.key in features
        and not item.is_estimate
        and (item.key.gpu_type, item.key.gpu_count) == (gpu_type, gpu_count)
    )


def _decode(document: Document) -> KnownFeatures:
    try:
        about = document.body["key"]
        key = ProfileKey(about["model"], about["batch_size"], about["gpu_count"], about["gpu_type"])
        return KnownFeatures(key, GraphFeatures.from_dict(document.body["features"]))
    except (KeyError, TypeError) as error:
        raise FeaturesError(f"the features stored for {document.name} are incomplete: {error!r} is missing") from error
