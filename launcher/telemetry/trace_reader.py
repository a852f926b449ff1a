"""Reads traces back: Chrome trace events, also of a runtime that was killed, and JSON lines."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from muri.errors import UsageError
from muri.profiler.records import STAGES

_WAIT: Final = "wait for "


class TraceFileError(UsageError):
    """The file is no trace of stages."""


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
        slices = list(_from_lines(text) if path.suffix == ".jsonl" else _from_events(load_events(text)))
    except (ValueError, KeyError, TypeError) as error:
        raise TraceFileError(
            f"{path} is no trace of stages: {error}. Write one with: muri run --trace {path.name}"
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
        events = json.loads(text)
    except ValueError:
        whole, _, _ = text.rstrip().removesuffix(",").rpartition("}")
        events = json.loads(whole + "}\n]")
    if isinstance(events, dict):  # the format's other form, as other tools save it
        events = events["traceEvents"]
    if not isinstance(events, list):
        raise ValueError("it is no list of events")  # noqa: TRY004 (the content is wrong, not an argument's type)
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


def _from_lines(text: str) -> Iterable[Slice]:
    for line in text.splitlines():
        event = json.loads(line)
        if event["wait_s"] > 0:
            yield Slice(event["member"], "wait", event["start_s"] - event["wait_s"], event["start_s"])
        yield Slice(event["member"], event["stage"], event["start_s"], event["end_s"])
