"""Reads a trace back, and draws which member held which resource when.

A trace is Chrome trace events, also of a runtime that was killed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from muri.errors import UsageError
from muri.files import whole_file
from muri.profiler.records import RESOURCES, STAGES
from muri.pythons import THE_LAB
from muri.text import json_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS: Final = {
    "load": "#4477aa", "preprocess": "#ccbb44", "propagate": "#228833", "synchronize": "#aa3377", "wait": "#dddddd",
}  # fmt: skip
MEMBER_COLORS: Final = ("#332288", "#88ccee", "#ddcc77", "#cc6677", "#117733", "#aa4499", "#999933", "#882255")
DEFAULT_SPAN_S: Final = 1.5

_WAIT: Final = "wait for "


class TraceFileError(UsageError):
    """The file is not a trace of stages."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of a member's time.

    Attributes:
        member: Job id, or "solo".
        what: The stage, or "wait".
        start_s: Start, in seconds since the epoch.
        end_s: End.
    """

    member: str
    what: str
    start_s: float
    end_s: float


def members_of(slices: Sequence[Slice]) -> list[str]:
    """The members, by job id."""
    return sorted({piece.member for piece in slices}, key=lambda member: (len(member), member))


def busiest_moment_s(slices: Sequence[Slice], span_s: float) -> float:
    """Start of a stretch in which most members were there: the middle of the longest such time."""
    own = [[piece for piece in slices if piece.member == member] for member in members_of(slices)]
    stays = [(min(p.start_s for p in pieces), max(p.end_s for p in pieces)) for pieces in own]
    moves = sorted({moment_s for stay in stays for moment_s in stay})

    def merit(between: tuple[float, float]) -> tuple[int, float]:
        begin_s, end_s = between
        return sum(first_s <= begin_s and end_s <= last_s for first_s, last_s in stays), end_s - begin_s

    begin_s, end_s = max(pairwise(moves), key=merit, default=(moves[0], moves[0]))
    return max(begin_s, (begin_s + end_s - span_s) / 2)


def within(slices: Iterable[Slice], begin_s: float, span_s: float) -> list[Slice]:
    """Those that lie in a stretch, or partly."""
    return [piece for piece in slices if piece.end_s > begin_s and piece.start_s < begin_s + span_s]


@dataclass(frozen=True, slots=True)
class Captions:
    """Texts of a picture.

    Attributes:
        title: Heading.
        names: Names of members by job id.
    """

    title: str = "What each job does, and who holds each resource"
    names: Mapping[str, str] = field(default_factory=dict)

    def of(self, member: str) -> str:
        """The member's name."""
        return f"{self.names[member]} (job {member})" if member in self.names else f"job {member}"


def draw(slices: Sequence[Slice], begin_s: float, span_s: float, output: Path, captions: Captions = Captions()) -> None:
    """Draw members above, resources below.

    Args:
        slices: The trace.
        begin_s: Where the picture begins, seconds since the epoch.
        span_s: How long it is.
        output: The file; its suffix chooses the format.
        captions: Heading and names.

    Raises:
        UsageError: matplotlib is missing, the file cannot be written, or nothing happened in that stretch.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (heavy, and optional)
    except ImportError as error:
        raise UsageError(f"a picture needs matplotlib: {THE_LAB}") from error
    shown = within(slices, begin_s, span_s)
    if not shown:
        length_s = max(p.end_s for p in slices) - min(p.start_s for p in slices)
        raise UsageError(f"nothing happened in that stretch; the trace is {length_s:.1f} s long")
    members = members_of(shown)  # others have left the group by then, or come later
    figure = Figure(figsize=(11, 0.45 * (len(members) + len(RESOURCES)) + 2.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[len(members), len(RESOURCES)])
    names = {member: captions.of(member) for member in members}
    _draw_members(upper, shown, names, begin_s)
    _draw_resources(lower, shown, names, begin_s)
    lower.set_xlim(0, span_s)
    lower.set_xlabel("seconds")
    upper.set_title(captions.title)
    try:
        with whole_file(output) as draft:
            figure.savefig(draft, dpi=110)
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise UsageError(f"cannot write the picture {output}: {reason}") from error


def _draw_members(axes: "Axes", shown: Sequence[Slice], names: Mapping[str, str], begin_s: float) -> None:
    for what, color in COLORS.items():
        for row, member in enumerate(names):
            spans = [(p.start_s - begin_s, p.end_s - p.start_s) for p in shown if (p.member, p.what) == (member, what)]
            height = 0.3 if what == "wait" else 0.8
            axes.broken_barh(spans, (row - height / 2, height), facecolors=color, linewidth=0)
    axes.set_yticks(range(len(names)), list(names.values()))
    axes.invert_yaxis()
    _legend(axes, COLORS)


def _draw_resources(axes: "Axes", shown: Sequence[Slice], names: Mapping[str, str], begin_s: float) -> None:
    colors = {member: MEMBER_COLORS[index % len(MEMBER_COLORS)] for index, member in enumerate(names)}
    for row, stage in enumerate(STAGES):
        for member, color in colors.items():
            spans = [(p.start_s - begin_s, p.end_s - p.start_s) for p in shown if (p.member, p.what) == (member, stage)]
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=color, linewidth=0)
    axes.set_yticks(range(len(RESOURCES)), list(RESOURCES))
    axes.invert_yaxis()
    _legend(axes, {names[member]: color for member, color in colors.items()})


def _legend(axes: "Axes", colors: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415 (as above)

    handles: list[Any] = [Patch(color=color, label=name) for name, color in colors.items()]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def read_slices(path: Path) -> list[Slice]:
    """All stretches of a trace, in the order of the file.

    Raises:
        TraceFileError: The file cannot be read, or holds no stage.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceFileError(f"cannot read the trace {path}: {error}") from error
    try:
        slices = list(_from_events(load_events(text)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"an event lacks {error}" if isinstance(error, KeyError) else error
        raise TraceFileError(
            f"{path} is not a trace of stages: {reason}. Write one with: muri run --trace {path.name}"
        ) from error
    if not slices:
        raise TraceFileError(f"the trace {path} holds no stage; does the script mark any?")
    return slices


def load_events(text: str) -> list[dict[str, Any]]:
    """Chrome trace events of a JSON array whose end may be missing.

    Raises:
        ValueError: It is something else.
    """
    try:
        events = json_of(text)
    except ValueError:
        whole, found, _ = text.rstrip().removesuffix(",").rpartition("}")
        if not found:
            raise  # there is no event that a killed runtime could have left whole
        events = json_of(whole + "}\n]")
    if isinstance(events, dict):  # the format's other form, as other tools save it
        events = events.get("traceEvents")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError("it is not a list of events")
    return events


def _from_events(events: Iterable[Mapping[str, Any]]) -> Iterable[Slice]:
    names = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event.get("name") == "thread_name"
    }
    for event in events:
        track = names.get((event.get("pid"), event.get("tid")), "")
        name = str(event.get("name"))
        if event.get("ph") != "X" or not track.startswith("job "):
            continue
        what = "wait" if name.startswith(_WAIT) else name
        if what == "wait" or what in STAGES:
            start_s = event["ts"] / 1e6
            yield Slice(track.removeprefix("job ").partition(",")[0], what, start_s, start_s + event["dur"] / 1e6)
