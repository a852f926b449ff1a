"""Muri's tags in a job's AdminComment: what its submission said, and what the controller did with the job.

AdminComment is shared with other tools. Muri's part consists of whitespace-separated words that start with `muri`;
everything else is kept. Because the tags live in Slurm itself, a lost journal loses no job: the original request of a
changed job is in its own comment.
"""

import base64
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple, TypeVar

from muri.slurm_plugin.records.cluster import RecordError, record_of
from muri.slurm_plugin.renamed import OLD_GATE, OLD_PILOT, OLD_TAGS
from muri.text import json_of, printable

REQUEST_PREFIX: Final = "muri:"
STATE_PREFIX: Final = "muri-state:"
PILOT_PREFIX: Final = "muri-pilot:"
DRY_RUN_PREFIX: Final = "muri-dryrun:"
SCRIPT_PREFIX: Final = "muri-script:"

GRANT_PREFIX: Final = "muri-grant:"
"""In a member's AdminComment: the pilot job whose GPUs are opened for it. The SPANK plugin acts on it, as root."""

CALLS_PREFIX: Final = "muri-calls:"
"""In a job's AdminComment: "no" where its batch script does not call `muri run` itself."""

FACTS_PREFIX: Final = "muri-facts:"
"""In a job's AdminComment: facts about its submission, a `SubmitFacts`."""

GIVEN_PREFIX: Final = "muri-given:"

PLACE_PREFIX: Final = "muri-place:"
"""In the AdminComment of an array's task that is kept back: what makes it stand behind siblings in Slurm's queue."""

PLAN_PREFIX: Final = "muri-plan:"
"""In a job's AdminComment: what was decided when it was started, for `muri queue` and `muri explain` on any host."""

_MOST_PLAN_CHARACTERS: Final = 2000
"""Of the tag: members read the tags of their job with squeue, which cuts off long comments."""

_LONGEST_REASON: Final = 300

_JOB_ID: Final = re.compile("[0-9]{1,10}")

USER_HOLD: Final = "muri-hold:user"

GATE_PREFIX: Final = "muri-gate:"
"""In a job's AdminComment: how its gate stands, see `muri.slurm_plugin.records.roles`."""

LICENSE_GATE: Final = OLD_GATE
"""The word of a job that a license keeps waiting; others are held."""

PROFILE_PREFIX: Final = "muri-profile:"
"""In a job's own comment: the result of a dry run with its script."""

MEASURED_PREFIX: Final = "muri-measured:"
"""In a job's own comment: its model's profile, measured in its first iterations in a group."""

SPEED_PREFIX: Final = "muri-speed:"

CHECKPOINT_PREFIX: Final = "muri-checkpoint:"
"""In a job's own comment: the run (0 = never requeued) that has declared its checkpoint."""

STOPPED_PREFIX: Final = "muri-stopped:"
"""In a job's own comment: the run that was stopped on purpose, to resume from its checkpoint later."""

RETRY_MEMORY_PREFIX: Final = "muri-retry-memory:"
"""In a member's AdminComment: a `MemoryRetry`."""

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
    """A job was given other CPUs or memory than its original request, at a time in seconds since the epoch."""

    given_s: int
    original: Original


@dataclass(frozen=True, slots=True)
class Place:
    """The settings that keep an array's task behind siblings that may start."""

    own_nice: int  # Its user's nice value
    nice: int  # Muri's
    dependency: str  # Muri's, "" for none


@dataclass(frozen=True, slots=True)
class MemberState:
    """A job is a member of a group."""

    pilot: int
    original: Original  # Request to restore when the group ends before the member has finished
    accumulate_steps: int = 1  # Number of micro-batches into which its batches are split
    limit_s: int = 0  # Time limit that Muri gave it last, in whole minutes as Slurm has it; 0 when unknown
    min_speed: float = 0.0  # Guaranteed minimum speed, 1 = as fast as alone; 0: none


@dataclass(frozen=True, slots=True)
class Planned:
    """The controller's decision about a job when it started it; None where it runs alone."""

    why: tuple[str, ...] = ()  # Sentences for people: why it is in its group, or alone
    speed: float | None = None  # Expected speed in its group, 1 = as fast as alone
    solo_iteration_s: float | None = None  # Iteration time alone, from its profile
    estimated: bool = False  # Whether that profile is an estimate


class PilotTag(NamedTuple):
    """The start that a pilot job belongs to, and its members in the order in which they were planned or joined."""

    token: str
    members: tuple[int, ...]


def token(comment: str, prefix: str) -> str | None:
    """Return what follows `prefix` in the first such word of a comment, None when there is none."""
    if prefix not in comment:  # most tags are in few comments, and words are found ten times slower
        old = OLD_TAGS.get(prefix)
        return None if old is None else token(comment, old)
    return next((word[len(prefix) :] for word in comment.split() if word.startswith(prefix)), None)


def with_token(comment: str, prefix: str, value: str | None) -> str:
    """Return the comment with its `prefix` word replaced, or removed when `value` is None.

    A tag that 0.2 wrote keeps its old prefix: the job's own process may run 0.2.
    """
    old = OLD_TAGS.get(prefix)
    if old is not None and token(comment, old) is not None:
        prefix = old
    kept = [word for word in comment.split() if not word.startswith(prefix)]
    return " ".join(kept if value is None else [*kept, prefix + value])


def format_record(record: Given | Place) -> str:
    """Write a record as a tag's text."""
    return format_json(asdict(record))


def format_json(value: Any) -> str:
    """Write JSON without any space, so that it stays one word."""
    # Escaping every space inside strings keeps the word in one piece.
    return json.dumps(value, separators=(",", ":"), sort_keys=True).replace(" ", "\\u0020")


def parse_json(text: str | None) -> dict[str, Any] | None:
    """Read a tag's JSON object; None when it is missing or damaged."""
    try:
        value = None if text is None else json_of(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


_Tag = TypeVar("_Tag")


def _parsed(admin_comment: str, prefix: str, kind: type[_Tag]) -> _Tag | None:
    """Read a tag that holds a record; None when it is missing or damaged."""
    values = parse_json(token(admin_comment, prefix))
    if values is None:
        return None
    if OLD_PILOT in values:
        values = {"pilot": values[OLD_PILOT], **values}
    try:
        record: _Tag = record_of(kind, values, exact=False)
    except RecordError:
        return None
    return record


def format_state(state: MemberState) -> str:
    """Write a member's state as a tag's text."""
    defaults = {"accumulate_steps": 1, "limit_s": 0, "min_speed": 0.0}
    values = {name: value for name, value in asdict(state).items() if value != defaults.get(name)}
    return format_json({**values, OLD_PILOT: state.pilot})


def is_member(admin_comment: str) -> bool:
    """Whether a job is a member, even if its tag is damaged."""
    return token(admin_comment, STATE_PREFIX) is not None


def parse_state(admin_comment: str) -> MemberState | None:
    """Read a member's state; None when the job is not a member or the tag is damaged."""
    state = _parsed(admin_comment, STATE_PREFIX, MemberState)
    return state if state is not None and 0 <= state.min_speed < 1 else None


def parse_given(admin_comment: str) -> Given | None:
    """Read a job's original request; None when it has its own CPUs and memory or the tag is damaged."""
    return _parsed(admin_comment, GIVEN_PREFIX, Given)


def parse_place(admin_comment: str) -> Place | None:
    """Read what keeps a task behind siblings; None when nothing does or the tag is damaged."""
    return _parsed(admin_comment, PLACE_PREFIX, Place)


def with_plan(admin_comment: str, planned: Planned | None) -> str:
    """Return an AdminComment with the decision about its job, or without any when `planned` is None.

    The last reasons are left out where there are too many.
    """
    text = None
    if planned is not None:
        shown = replace(planned, why=tuple(printable(reason[:_LONGEST_REASON]) for reason in planned.why))
        while len(text := _plan_text(shown)) > _MOST_PLAN_CHARACTERS and shown.why:
            shown = replace(shown, why=shown.why[:-1])
    return with_token(admin_comment, PLAN_PREFIX, text)


def _plan_text(planned: Planned) -> str:
    values = {name: value for name, value in asdict(planned).items() if value not in (None, False)}
    return format_json(
        {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in values.items()}
    )


def parse_plan(admin_comment: str) -> Planned | None:
    """Read the decision about a job; None when there is none, or the tag is damaged."""
    planned = _parsed(admin_comment, PLAN_PREFIX, Planned)
    if planned is None:
        return None
    figures = (each for each in (planned.speed, planned.solo_iteration_s) if each is not None)
    return planned if all(0 < each < math.inf for each in figures) else None


def format_pilot(start_token: str, members: tuple[int, ...]) -> str:
    """Write a pilot job's tag: the start that it belongs to, and its members."""
    return f"{start_token}:{','.join(map(str, members))}"


def parse_pilot(admin_comment: str) -> PilotTag | None:
    """Read a pilot job's tag; None for other jobs."""
    text = token(admin_comment, PILOT_PREFIX)
    if text is None:
        return None
    name, _, members = text.partition(":")
    return PilotTag(name, tuple(int(member) for member in members.split(",") if _JOB_ID.fullmatch(member)))


def mode_of(admin_comment: str) -> Mode:
    """Return how the members of a pilot with that AdminComment share."""
    return "plain" if token(admin_comment, MODE_PREFIX) == "plain" else "interleave"


class MemoryRetry(StrEnum):
    """What happens to a member that runs out of GPU memory beside others."""

    ALONE = ""
    """It runs alone next time."""
    WITH_MORE = "1"
    """It asks for more memory, because its policy plans by that."""
    NONE = "no"
    """It fails as it would alone: no controller is there to plan it again."""


def memory_retry(admin_comment: str) -> MemoryRetry:
    """Return what happens to a member that runs out of GPU memory beside others."""
    word = token(admin_comment, RETRY_MEMORY_PREFIX)
    return MemoryRetry(word) if word in set(MemoryRetry) else MemoryRetry.ALONE


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """The keys of `--muri`; a key that the tag lacks has its default. muri.lua has the same keys and limits."""

    model: str = ""  # Name under which the training profile is kept
    batch_size: int = 0  # Samples per iteration on one GPU
    duration_s: int | None = None  # Expected run time alone
    checkpoint: bool = False  # The job writes checkpoints and may be stopped and resumed
    alone: bool = False  # Profile the job but never group it with others
    accumulate: int = 1  # The script can split each batch into up to N parts (muri.accumulate)
    min_speed: float = 0.0  # Least speed beside others, as a share of its speed alone
    opportunistic: bool = False  # The job only asks for what others leave over


_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+/-]{0,63}")
_SHARE: Final = re.compile(r"0(\.[0-9]{0,2}[1-9])?")


def _number(most: int) -> Callable[[str], int | None]:
    form = re.compile(rf"[1-9][0-9]{{0,{len(str(most)) - 1}}}")
    return lambda text: number if form.fullmatch(text) and (number := int(text)) <= most else None


def _flag(text: str) -> bool | None:
    return True if text == "1" else None


_KEYS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "model": ("model", lambda text: text if _NAME.fullmatch(text) else None),
    "batch-size": ("batch_size", _number(1_000_000_000)),
    "duration": ("duration_s", _number(315_360_000)),
    "checkpoint": ("checkpoint", _flag),
    "alone": ("alone", _flag),
    "accumulate": ("accumulate", _number(1024)),
    "min-speed": ("min_speed", lambda text: float(text) if _SHARE.fullmatch(text) else None),
    "opportunistic": ("opportunistic", _flag),
}
"""Keys of `--muri`, each with its field and the function that returns its value, None where it is invalid."""


def parse_request(admin_comment: str) -> SubmitRequest | None:
    """Read the submit tag; None when the job was not submitted with `--muri`.

    job_submit writes only valid tags. A part that cannot be read or is out of range, because an administrator edited
    the comment, counts as not given.
    """
    text = token(admin_comment, REQUEST_PREFIX)
    if text is None:
        return None
    words = [(key, value) for key, _, value in (item.partition("=") for item in text.split(",")) if key in _KEYS]
    given = {_KEYS[key][0]: _KEYS[key][1](value) for key, value in words}
    return SubmitRequest(**{field: value for field, value in given.items() if value is not None})


_FACTS: Final = re.compile(r"1\.([0-9a-f]{16})?\.([0-9a-f]{16})\.([A-Za-z0-9_-]*)\.([A-Za-z0-9_-]*|~)")
_LONGEST_FACTS: Final = 4096
_PATH: Final = re.compile(r"/[^\x00-\x1f\x7f]*")


@dataclass(frozen=True, slots=True)
class SubmitFacts:
    """Facts about a submission, as `slurm_plugin/spank/muri.h` describes them.

    They come from the user's own process: they may say anything about that user's job, and are trusted no further than
    that.
    """

    line: str  # Digest of the command line's words
    arguments: tuple[str, ...] | None  # The batch script's, whatever bytes they hold; None when too long to travel
    environment: str = ""  # Digest of the Python and of the variables that decide which modules a script imports
    python: str = ""  # The first Python in PATH, "" when unknown


def read_facts(admin_comment: str) -> SubmitFacts | None:
    """Read the facts in an AdminComment; None when there are none or they are damaged."""
    text = token(admin_comment, FACTS_PREFIX)
    found = _FACTS.fullmatch(text) if text is not None and len(text) <= _LONGEST_FACTS else None
    if found is None:
        return None
    environment, line, python, arguments = found.groups()
    try:
        words = None if arguments == "~" else decode_words(arguments)
        path = _decoded(python).decode(errors="surrogateescape")
    except ValueError:
        return None
    return SubmitFacts(line, words, environment or "", path if _PATH.fullmatch(path) else "")


def encode_words(words: Iterable[str]) -> str:
    """Write words in an alphabet that needs no quotes."""
    text = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)
    return base64.urlsafe_b64encode(text).decode().rstrip("=")


def decode_words(text: str) -> tuple[str, ...]:
    """Read what `encode_words` wrote; bytes that are not UTF-8 stand as surrogate escapes.

    Raises:
        ValueError: It is damaged.
    """
    *words, rest = _decoded(text).split(b"\0")
    if rest:
        raise ValueError("the last argument has no end")
    return tuple(word.decode(errors="surrogateescape") for word in words)


def _decoded(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
