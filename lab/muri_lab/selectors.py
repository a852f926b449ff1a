"""Profiles named in one word, and profiles that need not be measured yet."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from muri.profiler.errors import NoSuchProfileError
from muri.profiler.lookup import PUBLISHED, Wanted, choices
from muri.profiler.records import ProfileKey

SELECTOR: Final = "MODEL[:BATCH[:GPUS[:TYPE[:USER]]]]"  # How a person names a profile in one word
_SELECTOR_PARTS: Final = 4  # Optional parts after the model: batch size, GPU count, GPU type, user


def key_for(keys: Iterable[ProfileKey], wanted: Wanted) -> ProfileKey:
    """The key that a request means, measured or not.

    Open parts are taken from the model's known profiles or, without any, are one GPU, an unknown batch size, the type
    "gpu" and all users. A published profile is meant rather than users' own ones.
    """
    near = sorted(key for key in keys if key.model == wanted.model and wanted.user in (None, key.user))
    user = min((key.user for key in near), default=wanted.user or "")
    if user and any(key.user != user for key in near):
        raise NoSuchProfileError(f"{wanted.model!r} is of several users. Say whose:\n{choices(near)}")
    near = [key for key in near if key.user == user]
    matching = [key for key in near if replace(wanted, gpu_count=None).matches(key)] or near
    batch_sizes = {key.batch_size for key in matching} if wanted.batch_size is None else {wanted.batch_size}
    gpu_types = {key.gpu_type for key in matching} if wanted.gpu_type is None else {wanted.gpu_type}
    if len(batch_sizes) > 1 or len(gpu_types) > 1:
        raise NoSuchProfileError(
            f"{wanted.model!r} has profiles of several batch sizes or GPU types. Say which with --batch-size or "
            f"--gpu-type:\n{choices(matching)}"
        )
    batch_size, gpu_type = min(batch_sizes, default=0), min(gpu_types, default="gpu")
    return ProfileKey(wanted.model, batch_size, wanted.gpu_count or 1, gpu_type, user)


def selector(keys: Iterable[ProfileKey], text: str) -> Wanted:
    """The request that a `SELECTOR` makes; the name of a known model may have colons itself."""
    models = {key.model for key in keys}
    parts = text.split(":")
    model = next((name for end in range(len(parts), 0, -1) if (name := ":".join(parts[:end])) in models), parts[0])
    said = [part or None for part in text[len(model) + 1 :].split(":")]
    if not model or len(said) > _SELECTOR_PARTS or not all(part is None or part.isdecimal() for part in said[:2]):
        raise NoSuchProfileError(f"{text!r} is not {SELECTOR}, such as resnet18:64:2:a100")
    batch_size, gpu_count, gpu_type, user = (said + [None] * _SELECTOR_PARTS)[:_SELECTOR_PARTS]
    batch, gpus = (None if part is None else int(part) for part in (batch_size, gpu_count))
    return Wanted(model, batch, gpus, gpu_type, "" if user == PUBLISHED else user)
