"""Which profiles a person means: by options, by a selector, by a list's filter, or by a script's fingerprint."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from muri.clock import moment
from muri.profiler.errors import NoSuchProfileError
from muri.profiler.records import ProfileKey, StageProfile
from muri.text import nearest

SELECTOR: Final = "MODEL[:BATCH[:GPUS[:TYPE[:USER]]]]"
"""How a person names a profile in one word."""

PUBLISHED: Final = "all"
"""Stands for the user of a published profile."""

_SELECTOR_PARTS: Final = 4
"""What may follow the model: batch size, GPU count, GPU type, user."""

DIGITS: Final = 8


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request for profiles; None for what the person left open."""

    model: str  # Model name
    batch_size: int | None = None  # Batch size; 0 means a profile whose batch size is not known
    gpu_count: int | None = None  # GPUs of the whole job
    gpu_type: str | None = None  # GRES type
    user: str | None = None  # Whose; "" means a published one

    def matches(self, key: ProfileKey) -> bool:
        """Whether a key has everything that was asked for."""
        return (
            key.model == self.model
            and self.batch_size in (None, key.batch_size)
            and self.gpu_count in (None, key.gpu_count)
            and self.gpu_type in (None, key.gpu_type)
            and self.user in (None, key.user)
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
            f"{len(found)} profiles are of {wanted.model!r}. Say which with --batch-size, --gpus, --gpu-type or --user:"
            f"\n{_choices(found)}"
        )
    return found[0]


def key_for(keys: Iterable[ProfileKey], wanted: Wanted) -> ProfileKey:
    """The key that a request means, measured or not.

    Open parts are taken from the model's known profiles or, without any, are one GPU, an unknown batch size, the type
    "gpu" and all users. A published profile is meant rather than users' own ones.

    Raises:
        NoSuchProfileError: The known profiles differ in it; the text lists the choices.
    """
    near = sorted(key for key in keys if key.model == wanted.model and wanted.user in (None, key.user))
    user = min((key.user for key in near), default=wanted.user or "")
    if user and any(key.user != user for key in near):
        raise NoSuchProfileError(f"{wanted.model!r} is of several users. Say whose:\n{_choices(near)}")
    near = [key for key in near if key.user == user]
    matching = [key for key in near if replace(wanted, gpu_count=None).matches(key)] or near
    batch_sizes = {key.batch_size for key in matching} if wanted.batch_size is None else {wanted.batch_size}
    gpu_types = {key.gpu_type for key in matching} if wanted.gpu_type is None else {wanted.gpu_type}
    if len(batch_sizes) > 1 or len(gpu_types) > 1:
        raise NoSuchProfileError(
            f"{wanted.model!r} has profiles of several batch sizes or GPU types. Say which with --batch-size or "
            f"--gpu-type:\n{_choices(matching)}"
        )
    batch_size, gpu_type = min(batch_sizes, default=0), min(gpu_types, default="gpu")
    return ProfileKey(wanted.model, batch_size, wanted.gpu_count or 1, gpu_type, user)


def selected(keys: Iterable[ProfileKey], text: str) -> ProfileKey:
    """The one key that a `SELECTOR` means.

    Raises:
        NoSuchProfileError: None or several match; the text lists the choices.
    """
    known = tuple(keys)
    return find_one(known, selector(known, text))


def selector(keys: Iterable[ProfileKey], text: str) -> Wanted:
    """The request that a `SELECTOR` makes; the name of a known model may have colons itself.

    Raises:
        NoSuchProfileError: The text is none.
    """
    models = {key.model for key in keys}
    parts = text.split(":")
    model = next((name for end in range(len(parts), 0, -1) if (name := ":".join(parts[:end])) in models), parts[0])
    said = [part or None for part in text[len(model) + 1 :].split(":")]
    if not model or len(said) > _SELECTOR_PARTS or not all(part is None or part.isdecimal() for part in said[:2]):
        raise NoSuchProfileError(f"{text!r} is not {SELECTOR}, such as resnet18:64:2:a100")
    batch_size, gpu_count, gpu_type, user = (said + [None] * _SELECTOR_PARTS)[:_SELECTOR_PARTS]
    return Wanted(model, _number(batch_size), _number(gpu_count), gpu_type, "" if user == PUBLISHED else user)


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _nothing(known: Sequence[ProfileKey], wanted: Wanted) -> str:
    same_model = [key for key in known if key.model == wanted.model]
    if same_model:
        return f"no such profile of {wanted.model!r}. There are:\n{_choices(same_model)}"
    models = sorted({key.model for key in known})
    near = nearest(wanted.model, models, most=5)
    if near:
        return f"no profile of model {wanted.model!r}; did you mean {' or '.join(near)}?"
    if models:
        return f"no profile of model {wanted.model!r}; `muri profile list` shows all {len(known)}"
    return f"no profile of model {wanted.model!r}: the store is empty"


def _choices(keys: Iterable[ProfileKey]) -> str:
    shown = tuple(keys)
    whose = any(key.user for key in shown)  # where all are published, it goes without saying
    return "\n".join(
        f"  {key.model} --batch-size {key.batch_size} --gpus {key.gpu_count} --gpu-type {key.gpu_type}"
        + (f" --user {key.user or PUBLISHED}" if whose else "")
        for key in shown
    )


def _newest_first(profile: StageProfile) -> float:
    then = moment(profile.measured_at)
    return 0.0 if then is None else -then.timestamp()


def _unsure_first(profile: StageProfile) -> float:
    return -1.0 if profile.detail.confidence is None else profile.detail.confidence


SORTS: Final[dict[str, Callable[[StageProfile], Any]]] = {
    "model": lambda profile: profile.key,
    "age": _newest_first,
    "iteration": lambda profile: -profile.iteration_s,
    "bottleneck": lambda profile: (profile.bottleneck, -max(profile.stage_s)),
    "gpu-mem": lambda profile: -profile.gpu_mem_gib,
    "host-mem": lambda profile: -(profile.detail.host_mem_gib or 0.0),
    "gpus": lambda profile: (-profile.key.gpu_count, profile.key),
    "confidence": _unsure_first,
}
"""Orders by name: the newest, longest, largest and least sure come first."""


@dataclass(frozen=True, slots=True)
class Filter:
    """The profiles that a list shows; None for what the person left open."""

    model: str | None = None  # Model name, or a pattern with * and ?
    gpu_type: str | None = None  # GRES type
    user: str | None = None  # Whose; "" means published ones

    def matches(self, key: ProfileKey) -> bool:
        """Whether a profile's key has everything that was asked for."""
        return (
            (self.model is None or key.model == self.model or fnmatchcase(key.model, self.model))
            and self.gpu_type in (None, key.gpu_type)
            and self.user in (None, key.user)
        )


def listed(profiles: Iterable[StageProfile], wanted: Filter, sort: str) -> tuple[StageProfile, ...]:
    """The profiles that match, in order.

    Raises:
        NoSuchProfileError: No profile at all has the model or the GPU type; the text lists the choices.
    """
    known = tuple(profiles)
    if known:
        _refuse_unknown(known, wanted)
    return tuple(sorted((profile for profile in known if wanted.matches(profile.key)), key=SORTS[sort]))


def _refuse_unknown(known: Sequence[StageProfile], wanted: Filter) -> None:
    types = sorted({profile.key.gpu_type for profile in known})
    if wanted.gpu_type is not None and wanted.gpu_type not in types:
        raise NoSuchProfileError(f"no profile of GPU type {wanted.gpu_type!r}; there are: {', '.join(types)}")
    model = wanted.model
    if model is not None and not any(Filter(model=model).matches(profile.key) for profile in known):
        find_all((profile.key for profile in known), Wanted(model))


def fingerprint(name: str, parts: Iterable[bytes]) -> str:
    """A readable name and a hash of everything else: "train.py@3f9ac2d1"."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)  # with its length: "a", "b" is not "ab"
    return f"{name}@{whole.hexdigest()[:DIGITS]}"


def of_command(command: Sequence[str]) -> str:
    """The fingerprint of a training command: the script's content and its arguments."""
    module = command[0] == "-m"
    target, *arguments = command[1:] if module else command
    paths = _module_paths(target) if module else [Path(target)]
    content = next((path.read_bytes() for path in paths if path.is_file()), b"")
    name = target if module else Path(target).name
    return fingerprint(name, [content, *(argument.encode(errors="surrogateescape") for argument in arguments)])


def _module_paths(module: str) -> list[Path]:
    base = Path(*module.split("."))
    return [base.with_suffix(".py"), base / "__main__.py"]
