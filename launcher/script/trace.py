"""The stage trace of a script or a group: as Chrome trace events, or as JSON lines.

`record` only appends a tuple, because it runs in the members' threads; `flush` formats and writes, beside the members.
Perfetto (ui.perfetto.dev) and chrome://tracing open trace events. The format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("JSON Array Format").
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from muri.clock import MIB
from muri.errors import UsageError
from muri.profiler.records import RESOURCES, STAGES

logger = logging.getLogger("muri.launcher")

MOST_PENDING: Final = 50_000
"""Events that are kept in memory between two flushes; beyond that they are counted and dropped."""

LARGEST_TRACE_BYTES: Final = 512 * MIB
"""Viewers cannot open larger traces: at this size the file is closed properly and the rest is dropped."""

COLORS: Final = {
    "load": "thread_state_uninterruptible",
    "preprocess": "thread_state_runnable",
    "propagate": "thread_state_running",
    "synchronize": "rail_animation",
}
"""Chrome's names of colors; Perfetto chooses its own by the slice's name."""

WAIT_COLOR: Final = "grey"
SHORTEST_WAIT_S: Final = 20e-6
"""A shorter wait is the cost of the request, not a wait for another member."""

RATE_INTERVAL_S: Final = 1.0
_RESOURCE_TRACKS: Final = 1_000
_LANES_PER_TRACK: Final = 100
_RESOURCES_SORT: Final = 2**30
"""Below all members, which are ordered by job id."""


class Stretch(NamedTuple):
    """A stretch of time in which a member held a resource, on the `time.perf_counter` clock."""

    member: str
    stage: str
    start_s: float
    end_s: float
    wait_s: float
    thread: int


class IterationMark(NamedTuple):
    """The end of a member's iteration, on the `time.perf_counter` clock."""

    member: str
    end_s: float
    iteration: int


def require_writable(trace: str) -> None:
    """Refuse a trace that cannot be written, before a script has begun for it; "" stands for none.

    Raises:
        UsageError: It cannot.
    """
    path = Path(trace)
    reason = ""
    if path.is_dir():
        reason = "it is a directory; name a file"
    elif not path.parent.is_dir():
        reason = f"there is not a directory {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "no permission"
    if trace and reason:
        raise UsageError(f"cannot write the trace {path}: {reason}")


class Trace(ABC):
    """Takes events cheaply from several threads and writes them to a new file when told.

    Raises:
        UsageError: The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0  # events lost because `flush` was not called or the file grew too large
        self._pending: deque[Stretch | IterationMark] = deque()
        self._lock = threading.Lock()
        self._written_bytes = 0
        self._epoch_offset_s = time.time() - time.perf_counter()
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write the trace {path}: {error.strerror}; name a file in a directory") from error

    def record(self, member: str, stage: str, start_s: float, end_s: float, wait_s: float) -> None:
        """Note a stage of a member, or of "solo", on the `time.perf_counter` clock; it waited `wait_s` before."""
        self._append(Stretch(member, stage, start_s, end_s, wait_s, threading.get_ident()))

    def iteration(self, member: str, iteration: int) -> None:
        """Note that a member's iteration with that number, counted from 1, ends now."""
        self._append(IterationMark(member, time.perf_counter(), iteration))

    def flush(self) -> None:
        """Write what was noted since the last call."""
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Write the rest and close the file; later events are dropped."""
        with self._lock:
            self._flush()
            if not self._file.closed:
                self._write(self._ending())
                self._file.close()
                if self.dropped:
                    logger.warning("the trace %s lacks %d events: they came too fast", self.path, self.dropped)

    @abstractmethod
    def _format(self, event: Stretch | IterationMark) -> list[str]:
        """The text of one event."""

    def _ending(self) -> str:
        return ""

    def _epoch_us(self, at_s: float) -> int:
        return round((at_s + self._epoch_offset_s) * 1e6)

    def _append(self, event: Stretch | IterationMark) -> None:
        if len(self._pending) < MOST_PENDING:
            self._pending.append(event)
        else:
            self.dropped += 1

    def _flush(self) -> None:
        parts: list[str] = []
        for _ in range(len(self._pending)):
            parts += self._format(self._pending.popleft())
        if self._file.closed:
            self.dropped += len(parts)
            return
        if parts:
            self._write("".join(parts))
        if self._written_bytes > LARGEST_TRACE_BYTES and not self._file.closed:
            self._write(self._ending())
            self._file.close()
            logger.warning("the trace %s ends here: it has reached %d MiB", self.path, self._written_bytes >> 20)

    def _write(self, text: str) -> None:
        """Write now. A full disk ends the trace alone: what is traced goes on."""
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # it tries to write the rest, too
                self._file.close()
            logger.warning("the trace %s ends here: %s", self.path, error.strerror)
        self._written_bytes += len(text)


class LinesTrace(Trace):
    """One line `{"member", "stage", "start_s", "end_s", "wait_s"}` for each stretch, in seconds since the epoch."""

    def _format(self, event: Stretch | IterationMark) -> list[str]:
        if isinstance(event, IterationMark):
            return []
        start_s, end_s = self._epoch_offset_s + event.start_s, self._epoch_offset_s + event.end_s
        times = {"start_s": round(start_s, 6), "end_s": round(end_s, 6), "wait_s": round(event.wait_s, 6)}
        return [json.dumps({"member": event.member, "stage": event.stage, **times}) + "\n"]


_encode: Final = json.JSONEncoder(separators=(",", ":")).encode  # made once: json.dumps would make one each time


class _Lanes:
    """Spreads slices that overlap over several threads of one track: slices on a thread must not cross."""

    def __init__(self) -> None:
        self._end_us: list[int] = []
        self._of_thread: dict[int, int] = {}

    def place(self, thread: int, start_us: int, end_us: int) -> int:
        """The lane of a slice: its thread's own, else one that is free."""
        lane = self._of_thread.get(thread)
        if lane is None or self._end_us[lane] > start_us:
            ends_us = enumerate(self._end_us)
            lane = next((index for index, lane_end_us in ends_us if lane_end_us <= start_us), len(self._end_us))
            if lane == len(self._end_us):
                self._end_us.append(0)
            self._of_thread = {**{key: value for key, value in self._of_thread.items() if value != lane}, thread: lane}
        self._end_us[lane] = end_us
        return lane


class ChromeTrace(Trace):
    """One process row; a thread track for each member and one for each resource, showing who holds it.

    The file is a JSON array. Each flush leaves whole events, so that a reader that accepts a missing "]", as
    Perfetto does, can read the trace of a runtime that was killed. The row is named after the group. A `shared`
    trace has tracks for resources: in a group each has one holder at a time.
    """

    def __init__(self, path: Path, group: str, *, shared: bool = True) -> None:
        super().__init__(path)
        self._shared = shared
        self._pid = os.getpid()
        self._tracks: dict[tuple[str, str, int], int] = {}
        self._lanes: dict[tuple[str, str], _Lanes] = {}
        self._rate_since: dict[str, tuple[float, int]] = {}
        origin = {"host": socket.gethostname(), "group": group}
        self._write("[\n" + self._metadata("process_name", 0, {"name": group, **origin})[len(",\n") :])
        self.flush()

    def _ending(self) -> str:
        return "\n]\n"

    def _format(self, event: Stretch | IterationMark) -> list[str]:
        if isinstance(event, IterationMark):
            return self._mark(event)
        resource = RESOURCES[STAGES.index(event.stage)]
        wait_s = event.wait_s if event.wait_s >= SHORTEST_WAIT_S else 0.0
        asked_us, start_us, end_us = map(self._epoch_us, (event.start_s - wait_s, event.start_s, event.end_s))
        lines, tid = self._thread(("member", event.member), event.thread, asked_us, end_us)
        if wait_s:
            lines.append(self._slice(f"wait for {resource}", tid, (asked_us, start_us), WAIT_COLOR, {}))
        wait_ms = {"wait_ms": round(event.wait_s * 1e3, 3)}
        lines.append(self._slice(event.stage, tid, (start_us, end_us), COLORS[event.stage], wait_ms))
        if not self._shared:
            return lines
        # A stretch that ended at a yield point is recorded after that of the member that went first: one lane.
        declared, holder_tid = self._thread(("resource", resource), -1, start_us, end_us)
        holder = {"stage": event.stage}
        held = self._slice(f"job {event.member}", holder_tid, (start_us, end_us), COLORS[event.stage], holder)
        return [*lines, *declared, held]

    def _mark(self, event: IterationMark) -> list[str]:
        at_s, at_us = event.end_s, self._epoch_us(event.end_s)
        lines, tid = self._thread(("member", event.member), -1, at_us, at_us)
        mark = {"name": f"iteration {event.iteration}", "cat": "iteration", "ph": "i", "s": "t", "tid": tid}
        lines.append(self._event(mark, at_us))
        since_s, before = self._rate_since.setdefault(event.member, (at_s, event.iteration))
        if at_s - since_s >= RATE_INTERVAL_S or event.iteration < before:
            rate = max(0.0, (event.iteration - before) / max(at_s - since_s, 1e-6))
            self._rate_since[event.member] = (at_s, event.iteration)
            counter = {"name": f"iterations/s, job {event.member}", "ph": "C", "args": {"value": round(rate, 3)}}
            lines.append(self._event(counter, at_us))
        return lines

    def _thread(self, track: tuple[str, str], thread: int, start_us: int, end_us: int) -> tuple[list[str], int]:
        """The thread id that a slice goes to, and what must be said of it when it is new."""
        lanes = self._lanes.setdefault(track, _Lanes())
        lane = 0 if thread < 0 else lanes.place(thread, start_us, end_us)
        tid = self._tracks.get((*track, lane))
        if tid is not None:
            return [], tid
        kind, name = track
        if kind == "resource":
            base = _RESOURCE_TRACKS + RESOURCES.index(name)
        else:
            members = list(dict.fromkeys(member for kind_of_lane, member in self._lanes if kind_of_lane == "member"))
            base = 1 + members.index(name)
        tid = self._tracks[(*track, lane)] = base * _LANES_PER_TRACK + lane
        title = f"{name}: held by" if kind == "resource" else f"job {name}"
        title += f", thread {lane + 1}" if lane else ""
        order = {"sort_index": _RESOURCES_SORT + tid if kind == "resource" else int(name) if name.isdecimal() else tid}
        return [
            self._metadata("thread_name", tid, {"name": title}),
            self._metadata("thread_sort_index", tid, order),
        ], tid

    def _slice(self, name: str, tid: int, span_us: tuple[int, int], color: str, arguments: Mapping[str, object]) -> str:
        fields = {"name": name, "cat": "stage", "ph": "X", "tid": tid, "cname": color, "args": arguments}
        return self._event({**fields, "dur": span_us[1] - span_us[0]}, span_us[0])

    def _event(self, fields: Mapping[str, object], at_us: int) -> str:
        return ",\n" + _encode({**fields, "pid": self._pid, "ts": at_us})

    def _metadata(self, name: str, tid: int, arguments: Mapping[str, object]) -> str:
        fields = {"name": name, "ph": "M", "pid": self._pid, "tid": tid, "args": arguments}
        return ",\n" + _encode(fields)


def open_trace(path: Path, group: str, *, shared: bool = True) -> Trace:
    """Start a trace: JSON lines when the file's name ends with .jsonl, else Chrome trace events.

    Raises:
        UsageError: The file cannot be written.
    """
    return LinesTrace(path) if path.suffix == ".jsonl" else ChromeTrace(path, group, shared=shared)
