"""Which profiles a list shows, and in what order."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from muri.profiler.errors import NoSuchProfileError
from muri.profiler.lookup import Wanted, find_all
from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.times import moment


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
    """What a person wants to see; None where nothing was said.

    Attributes:
        model: Model name, or a pattern with * and ?.
        batch_size: Batch size.
        gpu_count: GPUs of the whole job.
        gpu_type: GRES type.
        source: One of `SOURCES`.
        bottleneck: One of `RESOURCES`.
        stale: Only profiles that are to be measured again.
    """

    model: str | None = None
    batch_size: int | None = None
    gpu_count: int | None = None
    gpu_type: str | None = None
    source: str | None = None
    bottleneck: str | None = None
    stale: bool = False

    def matches(self, profile: StageProfile, stale: Collection[ProfileKey]) -> bool:
        """Whether a profile has everything that was said."""
        key = profile.key
        return (
            (self.model is None or key.model == self.model or fnmatchcase(key.model, self.model))
            and self.batch_size in (None, key.batch_size)
            and self.gpu_count in (None, key.gpu_count)
            and self.gpu_type in (None, key.gpu_type)
            and self.source in (None, profile.source)
            and self.bottleneck in (None, profile.bottleneck)
            and (not self.stale or key in stale)
        )


def listed(
    profiles: Iterable[StageProfile], wanted: Filter, stale: Collection[ProfileKey], sort: str, *, reverse: bool = False
) -> tuple[StageProfile, ...]:
    """The profiles that match, in order.

    Raises:
        NoSuchProfileError: No profile at all has the model or the GPU type; the text lists the choices.
    """
    known = tuple(profiles)
    if known:
        _refuse_unknown(known, wanted)
    found = (profile for profile in known if wanted.matches(profile, stale))
    return tuple(sorted(found, key=SORTS[sort], reverse=reverse))


def _refuse_unknown(known: Sequence[StageProfile], wanted: Filter) -> None:
    types = sorted({profile.key.gpu_type for profile in known})
    if wanted.gpu_type is not None and wanted.gpu_type not in types:
        raise NoSuchProfileError(f"no profile of GPU type {wanted.gpu_type!r}; there are: {', '.join(types)}")
    model = wanted.model
    if model is not None and not any(Filter(model=model).matches(profile, ()) for profile in known):
        find_all((profile.key for profile in known), Wanted(model))
