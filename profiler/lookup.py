"""Finding the profiles that a person means."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from muri.profiler.errors import NoSuchProfileError
from muri.profiler.records import ProfileKey


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a person said about a profile; None where nothing was said.

    Attributes:
        model: Model name.
        batch_size: Batch size; 0 means a profile whose batch size is not known.
        gpu_count: GPUs of the whole job.
        gpu_type: GRES type.
    """

    model: str
    batch_size: int | None = None
    gpu_count: int | None = None
    gpu_type: str | None = None

    def matches(self, key: ProfileKey) -> bool:
        """Whether a key has everything that was said."""
        return (
            key.model == self.model
            and self.batch_size in (None, key.batch_size)
            and self.gpu_count in (None, key.gpu_count)
            and self.gpu_type in (None, key.gpu_type)
        )


def find_all(keys: Iterable[ProfileKey], wanted: Wanted) -> tuple[ProfileKey, ...]:
    """All keys that match.

    Raises:
        NoSuchProfileError: None does; the text lists the nearest.
    """
    known = sorted(keys)
    found = tuple(key for key in known if wanted.matches(key))
    if not found:
        raise NoSuchProfileError(_nothing(known, wanted))
    return found


def find_one(keys: Iterable[ProfileKey], wanted: Wanted) -> ProfileKey:
    """The one key that matches.

    Raises:
        NoSuchProfileError: None or several do; the text lists the choices.
    """
    found = find_all(keys, wanted)
    if len(found) > 1:
        raise NoSuchProfileError(
            f"{len(found)} profiles are of {wanted.model!r}. Say which with --batch-size, --gpus or --gpu-type:"
            f"\n{_choices(found)}"
        )
    return found[0]


def _nothing(known: Sequence[ProfileKey], wanted: Wanted) -> str:
    same_model = [key for key in known if key.model == wanted.model]
    if same_model:
        return f"no such profile of {wanted.model!r}. There are:\n{_choices(same_model)}"
    models = sorted({key.model for key in known})
    near = difflib.get_close_matches(wanted.model, models, n=5, cutoff=0.4)
    if near:
        return f"no profile of model {wanted.model!r}; did you mean {' or '.join(near)}?"
    if models:
        return f"no profile of model {wanted.model!r}; `muri profile list` shows all {len(known)}"
    return f"no profile of model {wanted.model!r}: the store is empty"


def _choices(keys: Iterable[ProfileKey]) -> str:
    return "\n".join(
        f"  {key.model} --batch-size {key.batch_size} --gpus {key.gpu_count} --gpu-type {key.gpu_type}" for key in keys
    )
