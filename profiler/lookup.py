"""Which profiles a person means: by options, by a list's filter, or by a script's fingerprint."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from muri.clock import moment
from muri.profiler.errors import NoSuchProfileError
from muri.profiler.records import ProfileKey, StageProfile
from muri.text import nearest

PUBLISHED: Final = "all"
"""Stands for the user of a published profile."""

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
    """All keys that match (NoSuchProfileError: none does; the text lists the nearest)."""
    known = sorted(keys)
    found = tuple(key for key in known if wanted.matches(key))
    if not found:
        raise NoSuchProfileError(_nothing(known, wanted))
    return found


def find_one(keys: Iterable[ProfileKey], wanted: Wanted) -> ProfileKey:
    """The one key that matches (NoSuchProfileError: none or several do; the text lists the choices)."""
    found = find_all(keys, wanted)
    if len(found) > 1:
        raise NoSuchProfileError(
            f"{len(found)} profiles are of {wanted.model!r}. Say which with --batch-size, --gpus, --gpu-type or --user:"
            f"\n{choices(found)}"
        )
    return found[0]


def _nothing(known: Sequence[ProfileKey], wanted: Wanted) -> str:
    same_model = [key for key in known if key.model == wanted.model]
    if same_model:
        return f"no such profile of {wanted.model!r}. There are:\n{choices(same_model)}"
    models = sorted({key.model for key in known})
    near = nearest(wanted.model, models, most=5)
    if near:
        return f"no profile of model {wanted.model!r}; did you mean {' or '.join(near)}?"
    if models:
        return f"no profile of model {wanted.model!r}; `muri profile list` shows all {len(known)}"
    return f"no profile of model {wanted.model!r}: the store is empty"


def choices(keys: Iterable[ProfileKey]) -> str:
    """Return keys as options that name them, a line each."""
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


def listed(
    profiles: Iterable[StageProfile], sort: str, *, model: str | None, gpu_type: str | None, user: str | None
) -> tuple[StageProfile, ...]:
    """The profiles that a list shows, in order.

    Args:
        profiles: Those that there are.
        sort: One of `SORTS`.
        model: Model name, or a pattern with * and ?; None: every model.
        gpu_type: GRES type; None: every type.
        user: Whose; "" means published ones, None everybody's.

    Raises:
        NoSuchProfileError: No profile at all has the model or the GPU type; the text lists the choices.
    """
    known = sorted(profiles, key=SORTS[sort])
    types = sorted({profile.key.gpu_type for profile in known})
    if known and gpu_type not in (None, *types):
        raise NoSuchProfileError(f"no profile of GPU type {gpu_type!r}; there are: {', '.join(types)}")
    of_model = [each for each in known if model in (None, each.key.model) or fnmatchcase(each.key.model, model or "")]
    if known and model is not None and not of_model:
        find_all((profile.key for profile in known), Wanted(model))
    return tuple(each for each in of_model if gpu_type in (None, each.key.gpu_type) and user in (None, each.key.user))


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
