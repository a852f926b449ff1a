"""What a plan says of a group, on its way to the pilot job, the runtime and the members.

A new option of a member is a field here, set where planning makes the spec and read where it is needed. The runtime
reads it under the members' own Python, so this module needs nothing but the standard library.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from muri.errors import UsageError
from muri.foreign import json_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_JOB_ID: Final = re.compile("[0-9]+(_[0-9]+)*")
_PYTHON: Final = re.compile(r"(/[^\x00-\x1f\x7f]*)?")

_Check = Callable[[Any], Any]
"""Returns a value as it is kept.

Raises:
    UsageError: It makes no sense; the text says why.
"""

_Spec = TypeVar("_Spec", bound="DataclassInstance")


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{value!r} is not a finite number")
    return float(value)


def _not_negative(value: Any) -> float:
    if _number(value) < 0:
        raise UsageError(f"{value!r} must not be less than 0")
    return float(value)


def _positive(value: Any) -> float:
    if _number(value) <= 0:
        raise UsageError(f"{value!r} must be greater than 0")
    return float(value)


def _promise(value: Any) -> float:
    if not 0 <= _number(value) < 1:
        raise UsageError(f"{value!r} must be ≥ 0 and < 1")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{value!r} is not a positive integer")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{value!r} is neither true nor false")
    return value


def _optional(check: _Check) -> _Check:
    return lambda value: None if value is None else check(value)


def _one_of(*names: str) -> _Check:
    def check(value: Any) -> Any:
        if value not in names:
            raise UsageError(f"{value!r} is not one of {', '.join(names)}")
        return value

    return check


def _text_like(form: re.Pattern[str], what: str) -> _Check:
    def check(value: Any) -> str:
        if not isinstance(value, str) or not form.fullmatch(value):
            raise UsageError(f"{value!r} is not a {what}")
        return value

    return check


def _each(check: _Check) -> _Check:
    def check_all(values: Any) -> tuple[Any, ...]:
        if not isinstance(values, list | tuple):
            raise UsageError("it must be a list")
        return tuple(_at(str(index), check, value) for index, value in enumerate(values))

    return check_all


def _at(place: str, check: _Check, value: Any) -> Any:
    """Check a value; the error names its place, such as members.0.job_id."""
    try:
        return check(value)
    except UsageError as error:
        inner = str(error)
        joint = "." if re.match(r"[a-z_0-9]+[.:]", inner) else ": "
        raise UsageError(f"{place}{joint}{inner}") from error


def _check_fields(spec: Any, checks: Mapping[str, _Check]) -> None:
    for name, check in checks.items():
        object.__setattr__(spec, name, _at(name, check, getattr(spec, name)))


def _from_json(kind: type[_Spec], value: Any) -> _Spec:
    """Make a spec of a JSON object; what it does not know is refused, for both ends are of one version."""
    if not isinstance(value, dict):
        raise UsageError("it must be an object")
    known = {each.name for each in fields(kind)}
    for name in value:
        if name not in known:
            raise UsageError(f"{name}: there is no such field")
    try:
        return kind(**value)
    except TypeError as error:
        raise UsageError(f"a field is missing: {error}") from error


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """What is known of a member, and what it is to do.

    Attributes:
        job_id: Its job id.
        solo_iteration_s: Iteration time alone, None where it has to be learned.
        predicted_speed: Planned speed, 1 = as fast as alone; None where auto has to measure both ways.
        gpu_mem_gib: Peak GPU memory alone, None where it is not known: such a member is always let in.
        accumulate_steps: Into how many micro-batches its batches are split.
        min_speed: The speed that it was promised, 1 = as fast as alone; 0: none.
        isolation: thread: it may share the runtime's process, unless its script's $MURI_ISOLATION says process.
    """

    job_id: str
    solo_iteration_s: float | None = None
    predicted_speed: float | None = None
    gpu_mem_gib: float | None = None
    accumulate_steps: int = 1
    min_speed: float = 0.0
    isolation: Literal["thread", "process"] = "process"

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            UsageError: The text names the field.
        """
        _check_fields(self, _MEMBER_CHECKS)


_MEMBER_CHECKS: Final[Mapping[str, _Check]] = {
    "job_id": _text_like(_JOB_ID, "job id"),
    "solo_iteration_s": _optional(_positive),
    "predicted_speed": _optional(_positive),
    "gpu_mem_gib": _optional(_positive),
    "accumulate_steps": _count,
    "min_speed": _promise,
    "isolation": _one_of("thread", "process"),
}


@dataclass(frozen=True, slots=True)
class Place:
    """A job's place in a group, as the scheduler has noted it.

    Attributes:
        pilot: The group's pilot job; "" where that cannot be read.
        member: What is known of the job beforehand.
    """

    pilot: str
    member: MemberSpec


def _member(value: Any) -> MemberSpec:
    return value if isinstance(value, MemberSpec) else _from_json(MemberSpec, value)


def _ordered(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{value!r} is not a job id")
    return value


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group.

    Attributes:
        members: In the planned ordering.
        ordering: Job ids in the planned rotation of lockstep, None for an empty place; () for that of `members`.
        discipline: How members take turns; plain: they do not.
        node_count: Nodes of the group.
        gpus_per_node: GPUs on each node; each gets a runtime, a rank.
        attach_timeout_s: The pilot gives the GPUs back if no member came by then.
        telemetry_s: Most seconds between two of the pilot's reports of speed.
        poll_s: Most seconds between two looks at idle members' jobs.
        hang_timeout_s: What has hung for so long is ended; 0: never. A member's $MURI_HANG_TIMEOUT_S goes before it.
        trace: Whether to keep a trace of every stage beside the pilot's log.
        python: The members' own Python, which runs the runtime where members are its threads; "" for the pilot's.
    """

    members: tuple[MemberSpec, ...]
    ordering: tuple[str | None, ...] = ()
    discipline: Literal["auto", "fair", "lockstep", "plain"] = "auto"
    node_count: int = 1
    gpus_per_node: int = 1
    attach_timeout_s: float = 300.0
    telemetry_s: float = 300.0
    poll_s: float = 30.0
    hang_timeout_s: float = 900.0
    trace: bool = False
    python: str = ""

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            UsageError: The text names the field.
        """
        _check_fields(self, _GROUP_CHECKS)
        if not self.members:
            raise UsageError("members: there must be one at least")
        if len(set(self.ids)) != len(self.members):
            raise UsageError("a job is named twice")
        if self.ordering and sorted(each for each in self.ordering if each is not None) != sorted(self.ids):
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
        told = _changed(self) | {"members": [_changed(member) for member in self.members]}
        return json.dumps(told, separators=(",", ":"))


_GROUP_CHECKS: Final[Mapping[str, _Check]] = {
    "members": _each(_member),
    "ordering": _each(_ordered),
    "discipline": _one_of("auto", "fair", "lockstep", "plain"),
    "node_count": _count,
    "gpus_per_node": _count,
    "attach_timeout_s": _positive,
    "telemetry_s": _positive,
    "poll_s": _positive,
    "hang_timeout_s": _not_negative,
    "trace": _flag,
    "python": _text_like(_PYTHON, "path from the root"),
}


def _changed(spec: Any) -> dict[str, Any]:
    return {each.name: value for each in fields(spec) if (value := getattr(spec, each.name)) != each.default}


def group_of(values: Any) -> GroupSpec:
    """Make a group of plain values, as JSON has them.

    Raises:
        UsageError: Something makes no sense; the error says where and why.
    """
    return _from_json(GroupSpec, values)


def read_group(text: str) -> GroupSpec:
    """Read what `GroupSpec.to_text` wrote.

    Raises:
        UsageError: It is no such text; the error says where and why.
    """
    try:
        return group_of(json_of(text))
    except ValueError as error:
        raise UsageError(f"--group: not valid JSON: {error}") from error
    except UsageError as error:
        raise UsageError(f"--group: {error}") from error
