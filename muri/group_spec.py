"""What a plan says of a group, on its way to the pilot job, the runtime and the members.

A new option of a member is a field here, set where planning makes the spec and read where it is needed.
"""

from typing import Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from muri.errors import UsageError


class _Spec(BaseModel):
    """A part that refuses what it does not know: both ends are of one version."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class MemberSpec(_Spec):
    """What is known of a member, and what it is to do.

    Attributes:
        job_id: Its job id.
        solo_iteration_s: Iteration time alone, None where it has to be learnt.
        predicted_speed: Planned speed, 1 = as fast as alone; None where auto has to measure both ways.
        gpu_mem_gib: Peak GPU memory alone, None where it is not known: such a member is always let in.
        accumulate_steps: Into how many micro-batches its batches are split.
    """

    job_id: str = Field(pattern=r"^[0-9]+(_[0-9]+)*$")
    solo_iteration_s: PositiveFloat | None = None
    predicted_speed: PositiveFloat | None = None
    gpu_mem_gib: PositiveFloat | None = None
    accumulate_steps: PositiveInt = 1


class GroupSpec(_Spec):
    """A group.

    Attributes:
        members: In the planned ordering.
        ordering: Job ids in the planned rotation of lockstep, None for an empty place; () for that of `members`.
        discipline: How members take turns; plain: they do not.
        isolation: How members run whose scripts do not say it by $MURI_ISOLATION.
        node_count: Nodes of the group.
        gpus_per_node: GPUs on each node; each gets a runtime, a rank.
        attach_timeout_s: The pilot gives the GPUs back if no member came by then.
        telemetry_s: Seconds between two of the pilot's reports of speed.
        poll_s: Seconds between two looks at idle members' jobs.
        hang_timeout_s: What has hung for so long is ended; 0: never. A member's $MURI_HANG_TIMEOUT_S goes before it.
        trace: Whether to keep a trace of every stage beside the pilot's log.
    """

    members: tuple[MemberSpec, ...] = Field(min_length=1)
    ordering: tuple[str | None, ...] = ()
    discipline: Literal["auto", "fair", "lockstep", "plain"] = "auto"
    isolation: Literal["thread", "process"] = "thread"
    node_count: PositiveInt = 1
    gpus_per_node: PositiveInt = 1
    attach_timeout_s: PositiveFloat = 300.0
    telemetry_s: PositiveFloat = 15.0
    poll_s: PositiveFloat = 5.0
    hang_timeout_s: NonNegativeFloat = 900.0
    trace: bool = False

    @model_validator(mode="after")
    def _names_each_member_once(self) -> Self:
        if len(set(self.ids)) != len(self.members):
            raise ValueError("a job is named twice")
        if self.ordering and sorted(each for each in self.ordering if each is not None) != sorted(self.ids):
            raise ValueError(f"the ordering must hold each of the members {', '.join(self.ids)} once")
        return self

    @property
    def ids(self) -> list[str]:
        """Job ids in the planned ordering."""
        return [member.job_id for member in self.members]

    @property
    def rotation(self) -> list[str | None]:
        """Job ids in the rotation of lockstep; None is an empty place."""
        return list(self.ordering or self.ids)

    def to_text(self) -> str:
        """Write it as one line of JSON, without what has its default."""
        return self.model_dump_json(exclude_defaults=True)


def read_group(text: str) -> GroupSpec:
    """Read what `GroupSpec.to_text` wrote.

    Raises:
        UsageError: It is no such text; the error says where and why.
    """
    try:
        return GroupSpec.model_validate_json(text)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'group'}: {each['msg']}" for each in error.errors())
        raise UsageError(f"--group: {problems}") from error
