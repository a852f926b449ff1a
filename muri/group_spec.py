"""A planned group, on its way to the pilot job, the runtime and the members.

A new option of a member is a field here, set where planning makes the spec and read where it is needed. The runtime
reads it under the members' own Python, so this module needs nothing but the standard library.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from muri.errors import UsageError
from muri.text import json_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Check = Callable[[Any], str]
"""Returns what is wrong with a value, "" if nothing is."""

_Spec = TypeVar("_Spec", bound="DataclassInstance")


def _number(bounds: str, is_within: Callable[[float], bool], *, optional: bool = False) -> _Check:
    def fault(value: Any) -> str:
        if value is None and optional:
            return ""
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return "is not a finite number"
        return "" if is_within(value) else f"must be {bounds}"

    return fault


def _one_of(*names: str) -> _Check:
    return lambda value: "" if value in names else f"is not one of {', '.join(names)}"


def _text_like(form: str, what: str) -> _Check:
    return lambda value: "" if isinstance(value, str) and re.fullmatch(form, value) else f"is not a {what}"


_POSITIVE: Final = _number("greater than 0", lambda value: value > 0)
_POSITIVE_OR_NONE: Final = _number("greater than 0", lambda value: value > 0, optional=True)
_JOB_ID: Final = _text_like("[0-9]+(_[0-9]+)*", "job id")


def _count(value: Any) -> str:
    return "" if type(value) is int and value > 0 else "is not a positive integer"


def _require(spec: Any, checks: Mapping[str, _Check]) -> None:
    for name, fault in checks.items():
        value = getattr(spec, name)
        if why := fault(value):
            raise UsageError(f"{name}: {value!r} {why}")


def _from_json(kind: type[_Spec], value: Any) -> _Spec:
    """Make a spec of a JSON object; an unknown field is refused, for both ends are of one version."""
    if not isinstance(value, dict):
        raise UsageError("it must be an object")
    for name in value.keys() - {each.name for each in fields(kind)}:
        raise UsageError(f"{name}: there is no such field")
    for each in fields(kind):
        if each.default is MISSING and each.name not in value:
            raise UsageError(f"{each.name}: this field is missing")
    return kind(**value)


def _list_of(values: Mapping[str, Any], name: str) -> list[Any]:
    value = values.get(name, [])
    if not isinstance(value, list | tuple):
        raise UsageError(f"{name}: it must be a list")
    return list(value)


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """A member: the plan's figures, and its options."""

    job_id: str
    solo_iteration_s: float | None = None  # Iteration time alone, None where it has to be learned
    # Planned speed, 1 = as fast as alone; None where auto has to measure both ways
    predicted_speed: float | None = None
    # Peak GPU memory alone, None where it is not known: such a member is always admitted
    gpu_mem_gib: float | None = None
    accumulate_steps: int = 1  # Into how many micro-batches its batches are split
    min_speed: float = 0.0  # The speed that it was promised, 1 = as fast as alone; 0: none
    # thread: it may share the runtime's process, unless its script's $MURI_ISOLATION says process
    isolation: Literal["thread", "process"] = "process"

    def __post_init__(self) -> None:
        """Raise a UsageError that names a field with a wrong value."""
        _require(self, _MEMBER_CHECKS)


_MEMBER_CHECKS: Final[Mapping[str, _Check]] = {
    "job_id": _JOB_ID,
    "solo_iteration_s": _POSITIVE_OR_NONE,
    "predicted_speed": _POSITIVE_OR_NONE,
    "gpu_mem_gib": _POSITIVE_OR_NONE,
    "accumulate_steps": _count,
    "min_speed": _number("≥ 0 and < 1", lambda value: 0 <= value < 1),
    "isolation": _one_of("thread", "process"),
}


@dataclass(frozen=True, slots=True)
class Place:
    """A job's place in a group, as the scheduler has noted it."""

    pilot: str  # The group's pilot job; "" where that cannot be read
    member: MemberSpec  # The job's figures and options


def cancelled_pilot(pilot: str, member: str) -> str:
    """Return the sentence for a member's user when Slurm ends the pilot job and the member goes back to the queue."""
    return (
        f"pilot job {pilot}, which held the GPUs of its group, was cancelled or has reached its time limit "
        f"(to end this job alone: scancel {member})"
    )


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group."""

    members: tuple[MemberSpec, ...]  # In the planned ordering
    # Job ids in the planned rotation of lockstep, None for an empty place; () for that of `members`
    ordering: tuple[str | None, ...] = ()
    discipline: Literal["auto", "fair", "lockstep", "plain"] = "auto"  # How members take turns; plain: they do not
    node_count: int = 1
    gpus_per_node: int = 1  # GPUs on each node; each gets a runtime, a rank
    attach_timeout_s: float = 300.0  # The pilot gives the GPUs back if no member came by then
    telemetry_s: float = 300.0  # Most seconds between two of the pilot's reports of speed
    poll_s: float = 30.0  # Most seconds between two looks at idle members' jobs
    # A script that hangs for so long is ended; 0: never. A member's $MURI_HANG_TIMEOUT_S wins
    hang_timeout_s: float = 900.0
    trace: bool = False  # Whether to keep a trace of every stage beside the pilot's log
    # The members' own Python, which runs the runtime where members are its threads; "" for the pilot's
    python: str = ""

    def __post_init__(self) -> None:
        """Raise a UsageError that names a field with a wrong value."""
        _require(self, _GROUP_CHECKS)
        if not self.members:
            raise UsageError("members: there must be one at least")
        if len(set(self.ids)) != len(self.members):
            raise UsageError("a job is named twice")
        named = [each for each in self.ordering if each is not None]
        if self.ordering and (len(named) != len(self.ids) or any(job_id not in named for job_id in self.ids)):
            raise UsageError(f"the ordering must hold each of the members {', '.join(self.ids)} once")

    @property
    def ids(self) -> list[str]:
        """Job ids in the planned ordering."""
        return [member.job_id for member in self.members]

    @property
    def threads(self) -> frozenset[str]:
        """Job ids of the members that may be threads of the runtime."""
        return frozenset(member.job_id for member in self.members if member.isolation == "thread")

    @property
    def rotation(self) -> list[str | None]:
        """Job ids in the rotation of lockstep; None is an empty place."""
        return list(self.ordering or self.ids)

    def to_text(self) -> str:
        """Write it as one line of JSON, without what has its default."""
        values = _changed(self) | {"members": [_changed(member) for member in self.members]}
        return json.dumps(values, separators=(",", ":"))


_GROUP_CHECKS: Final[Mapping[str, _Check]] = {
    "discipline": _one_of("auto", "fair", "lockstep", "plain"),
    "node_count": _count,
    "gpus_per_node": _count,
    "attach_timeout_s": _POSITIVE,
    "telemetry_s": _POSITIVE,
    "poll_s": _POSITIVE,
    "hang_timeout_s": _number("≥ 0", lambda value: value >= 0),
    "trace": lambda value: "" if isinstance(value, bool) else "is neither true nor false",
    "python": _text_like(r"(/[^\x00-\x1f\x7f]*)?", "path from the root"),
}


def _changed(spec: Any) -> dict[str, Any]:
    return {each.name: value for each in fields(spec) if (value := getattr(spec, each.name)) != each.default}


def group_of(values: Any) -> GroupSpec:
    """Make a group of plain values, as JSON has them."""
    if not isinstance(values, dict):
        raise UsageError("it must be an object")
    members = []
    for index, member in enumerate(_list_of(values, "members")):
        try:
            members.append(_from_json(MemberSpec, member))
        except UsageError as error:
            raise UsageError(f"members.{index}.{error}") from error
    return _from_json(GroupSpec, {**values, "members": tuple(members), "ordering": tuple(_list_of(values, "ordering"))})


def read_group(text: str) -> GroupSpec:
    """Read what `GroupSpec.to_text` wrote."""
    try:
        return group_of(json_of(text))
    except ValueError as error:
        raise UsageError(f"--group: not valid JSON: {error}") from error
    except UsageError as error:
        raise UsageError(f"--group: {error}") from error
