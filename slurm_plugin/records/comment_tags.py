"""Muri's tokens in a job's AdminComment: what the controller did with the job.

AdminComment is shared with other tools. Muri's part consists of whitespace-separated words that
start with `muri`; everything else is kept as it is. Because the tokens live in Slurm itself, a
lost journal loses no job: the original request of a changed job is in its own comment.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple

from muri.foreign import json_of
from muri.slurm_plugin.renamed import OLD_PILOT, OLD_TAGS
from muri.text import printable

REQUEST_PREFIX: Final = "muri:"

STATE_PREFIX: Final = "muri-state:"

PILOT_PREFIX: Final = "muri-pilot:"

DRY_RUN_PREFIX: Final = "muri-dryrun:"

SCRIPT_PREFIX: Final = "muri-script:"

CALLS_PREFIX: Final = "muri-calls:"
"""In a job's AdminComment: "no" where its batch script does not call `muri run` itself."""

FACTS_PREFIX: Final = "muri-facts:"
"""In a job's AdminComment: what its submission told, see `muri.slurm_plugin.records.submission`."""

GIVEN_PREFIX: Final = "muri-given:"

PLACE_PREFIX: Final = "muri-place:"
"""In the AdminComment of an array's task that is kept back: what makes it stand behind siblings in Slurm's queue."""

PLAN_PREFIX: Final = "muri-plan:"
"""In a job's AdminComment: what was decided when it was started, for `muri queue` and `muri explain` on any host."""

_MOST_PLAN_CHARACTERS: Final = 2000
"""Of the token: members read the tags of their job with squeue, which cuts off long comments."""

_LONGEST_REASON: Final = 300

USER_HOLD: Final = "muri-hold:user"

GATE_PREFIX: Final = "muri-gate:"
"""In a job's AdminComment: how its gate stands, see `muri.slurm_plugin.records.roles`."""

LICENCE_GATE: Final = "licence"
"""The word of a job that a license keeps waiting; others are held."""

PROFILE_PREFIX: Final = "muri-profile:"
"""In a job's own comment: what a dry run with its script found."""

MEASURED_PREFIX: Final = "muri-measured:"
"""In a job's own comment: what its first iterations in a group told of its model."""

SPEED_PREFIX: Final = "muri-speed:"

CHECKPOINT_PREFIX: Final = "muri-checkpoint:"
"""In a job's own comment: the run (0 = never requeued) that has declared its checkpoint."""

STOPPED_PREFIX: Final = "muri-stopped:"
"""In a job's own comment: the run that was stopped on purpose, to resume from its checkpoint later."""

RETRY_MEMORY_PREFIX: Final = "muri-retry-memory:"
"""What becomes of a member that runs out of GPU memory beside others, a `MemoryRetry`."""

OUT_OF_MEMORY_PREFIX: Final = "muri-out-of-memory:"
"""In a job's own comment: the run that ended for lack of GPU memory beside others, and how often that has happened."""

Mode = Literal["interleave", "plain"]
"""How members of a group share their GPU, as in `Group.mode`."""

MODE_PREFIX: Final = "muri-mode:"
"""In a pilot job's AdminComment: plain where its members share without turns."""


@dataclass(frozen=True, slots=True)
class Original:
    """The parts of a job's request that Muri changes, as the user wrote them."""

    gpu_request: str
    required_nodes: str
    cpu_count: int
    cpus_per_task: int
    mem_per_node_mib: int
    time_limit_s: int
    mem_per_cpu_mib: int = 0


@dataclass(frozen=True, slots=True)
class Given:
    """That a job was given other CPUs or memory than it asked for.

    Attributes:
        given_s: When, seconds since the epoch.
        original: What it had asked for.
    """

    given_s: int
    original: Original


@dataclass(frozen=True, slots=True)
class Place:
    """What makes an array's task that is kept back stand behind siblings that may start.

    Attributes:
        own_nice: Its user's nice value.
        nice: The value that it was given.
        dependency: The dependency that it was given, "" for none.
    """

    own_nice: int
    nice: int
    dependency: str = ""


@dataclass(frozen=True, slots=True)
class MemberState:
    """That a job was made a member.

    Attributes:
        pilot: Job id of the group's pilot job.
        original: What to put back when the group ends without the member having finished.
        accumulate_steps: Into how many micro-batches its batches are to be split.
        limit_s: The time limit that Muri gave it last, in whole minutes as Slurm has it; 0 when that is not known.
        min_speed: The speed that it was promised, 1 = as fast as alone; 0: none.
    """

    pilot: int
    original: Original
    accumulate_steps: int = 1
    limit_s: int = 0
    min_speed: float = 0.0


@dataclass(frozen=True, slots=True)
class Planned:
    """What the controller decided about a job when it started it.

    Attributes:
        why: Sentences for people: why it is in its group, or alone.
        speed: Speed that the plan expects in its group, 1 = as fast as alone; None where it runs alone.
        solo_iteration_s: Iteration time alone, from its profile; None where it runs alone.
        estimated: Whether that profile is an estimate.
    """

    why: tuple[str, ...] = ()
    speed: float | None = None
    solo_iteration_s: float | None = None
    estimated: bool = False


class PilotTag(NamedTuple):
    """What a pilot job carries.

    Attributes:
        token: The start that it belongs to.
        members: Job ids of its group's members, in the order in which they were planned or joined.
    """

    token: str
    members: tuple[int, ...]


def token(comment: str, prefix: str) -> str | None:
    """Return what follows `prefix` in the first such token of a comment, None when there is none."""
    if prefix not in comment:  # most tags are in few comments, and words are found ten times slower
        old = OLD_TAGS.get(prefix)
        return None if old is None else token(comment, old)
    return next((word[len(prefix) :] for word in comment.split() if word.startswith(prefix)), None)


def with_token(comment: str, prefix: str, value: str | None) -> str:
    """Return the comment with its `prefix` token replaced, or taken out when `value` is None.

    A tag that 0.2 wrote keeps its old prefix: the job's own process may run 0.2.
    """
    old = OLD_TAGS.get(prefix)
    if old is not None and token(comment, old) is not None:
        prefix = old
    kept = [word for word in comment.split() if not word.startswith(prefix)]
    if value is not None:
        kept.append(prefix + value)
    return " ".join(kept)


def format_json(value: Any) -> str:
    """Write JSON without any space, so that it stays one token."""
    # Escaping every space inside strings keeps the token in one piece.
    return json.dumps(value, separators=(",", ":"), sort_keys=True).replace(" ", "\\u0020")


def parse_json(text: str | None) -> dict[str, Any] | None:
    """Read a token's JSON object; None when it is missing or damaged."""
    if text is None:
        return None
    try:
        value = json_of(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def format_state(state: MemberState) -> str:
    """Write a member's state as a token's text."""
    steps = {"accumulate_steps": state.accumulate_steps} if state.accumulate_steps > 1 else {}
    limit = {"limit_s": state.limit_s} if state.limit_s else {}
    promise = {"min_speed": state.min_speed} if state.min_speed else {}
    pilot = {"pilot": state.pilot, OLD_PILOT: state.pilot}
    return format_json({**pilot, "original": asdict(state.original), **steps, **limit, **promise})


def is_member(admin_comment: str) -> bool:
    """Whether a job was made a member, be its token damaged or not."""
    return token(admin_comment, STATE_PREFIX) is not None


def parse_state(admin_comment: str) -> MemberState | None:
    """Read a member's state; None when the job is not a member or the token is damaged."""
    told = parse_json(token(admin_comment, STATE_PREFIX))
    try:
        if told is None:
            return None
        steps, limit_s = _whole(told.get("accumulate_steps", 1)), _whole(told.get("limit_s", 0))
        promise = _promise(told.get("min_speed", 0))
        pilot = _whole(told["pilot"] if "pilot" in told else told[OLD_PILOT])
        return MemberState(pilot, _original(told["original"]), steps, limit_s, promise)
    except (KeyError, TypeError):
        return None


def format_given(given: Given) -> str:
    """Write that a job was given other CPUs or memory, as a token's text."""
    return format_json(asdict(given))


def parse_given(admin_comment: str) -> Given | None:
    """Read what a job had asked for; None when it has its own request or the token is damaged."""
    told = parse_json(token(admin_comment, GIVEN_PREFIX))
    try:
        return None if told is None else Given(_whole(told["given_s"]), _original(told["original"]))
    except (KeyError, TypeError):
        return None


def format_place(place: Place) -> str:
    """Write what makes a task stand behind siblings, as a token's text."""
    return format_json(asdict(place))


def parse_place(admin_comment: str) -> Place | None:
    """Read what makes a task stand behind siblings; None when nothing does or the token is damaged."""
    told = parse_json(token(admin_comment, PLACE_PREFIX))
    try:
        if told is None:
            return None
        return Place(_whole(told["own_nice"]), _whole(told["nice"]), _text(told["dependency"]))
    except (KeyError, TypeError):
        return None


def _original(told: Any) -> Original:
    """Read a job's own request.

    Raises:
        KeyError, TypeError: Something is missing or of another kind.
    """
    values = {"mem_per_cpu_mib": 0, **told}
    return Original(**{each.name: _READERS[each.type](values[each.name]) for each in fields(Original)})


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _promise(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise TypeError(f"{value!r} is not a number from 0 to 1")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


_READERS: Final[dict[Any, Any]] = {int: _whole, str: _text}


def with_plan(admin_comment: str, planned: Planned | None) -> str:
    """Return an AdminComment that tells what was decided about its job, or nothing of it when `planned` is None.

    The last reasons are left out where there are too many.
    """
    text = None
    if planned is not None:
        shown = replace(planned, why=tuple(printable(reason[:_LONGEST_REASON]) for reason in planned.why))
        while len(text := format_json(_told(shown))) > _MOST_PLAN_CHARACTERS and shown.why:
            shown = replace(shown, why=shown.why[:-1])
    return with_token(admin_comment, PLAN_PREFIX, text)


def _told(planned: Planned) -> dict[str, Any]:
    told = {name: value for name, value in asdict(planned).items() if value not in (None, False)}
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in told.items()}


def parse_plan(admin_comment: str) -> Planned | None:
    """Read what was decided about a job; None when nothing was, or the token is damaged."""
    told = parse_json(token(admin_comment, PLAN_PREFIX))
    why = None if told is None else told.get("why", [])
    if told is None or not isinstance(why, list):
        return None
    try:
        speed, solo_iteration_s = (_positive(told.get(name)) for name in ("speed", "solo_iteration_s"))
    except TypeError:
        return None
    return Planned(tuple(map(str, why)), speed, solo_iteration_s, told.get("estimated") is True)


def _positive(value: object) -> float | None:
    """Return a number above 0, or None where there is none.

    Raises:
        TypeError: It is something else.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise TypeError(f"{value!r} is not a number above 0")
    return float(value)


def format_pilot(start_token: str, members: tuple[int, ...]) -> str:
    """Write a pilot job's token: which start it belongs to and who its members are."""
    return f"{start_token}:{','.join(map(str, members))}"


def parse_pilot(admin_comment: str) -> PilotTag | None:
    """Read a pilot job's token; None when the job is none."""
    text = token(admin_comment, PILOT_PREFIX)
    if text is None:
        return None
    name, _, members = text.partition(":")
    return PilotTag(name, tuple(int(member) for member in members.split(",") if member.isdigit()))


def mode_of(admin_comment: str) -> Mode:
    """Return how the members of a pilot with that AdminComment share."""
    return "plain" if token(admin_comment, MODE_PREFIX) == "plain" else "interleave"


def with_mode(admin_comment: str, mode: Mode) -> str:
    """Return a new pilot job's AdminComment with the way in which its members share."""
    return with_token(admin_comment, MODE_PREFIX, "plain") if mode == "plain" else admin_comment


class MemoryRetry(StrEnum):
    """What becomes of a member that runs out of GPU memory beside others."""

    ALONE = ""
    """It runs alone next time."""
    WITH_MORE = "1"
    """It asks for more memory, because its policy plans by that."""
    NONE = "no"
    """It fails as it would alone: no controller is there to plan it again."""


def memory_retry(admin_comment: str) -> MemoryRetry:
    """Return what becomes of a member that runs out of GPU memory beside others."""
    told = token(admin_comment, RETRY_MEMORY_PREFIX)
    return MemoryRetry(told) if told in set(MemoryRetry) else MemoryRetry.ALONE
