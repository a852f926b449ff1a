"""The stage trace of a script or a group, as Chrome trace events.

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
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable, Final

from muri.clock import MIB
from muri.errors import UsageError
from muri.profiler.records import RESOURCES, STAGES

logger = logging.getLogger("muri.launcher")

MOST_PENDING: Final = 50_000
"""Events that are kept in memory between two flushes; beyond that they are counted and dropped."""

LARGEST_TRACE_BYTES: Final = 512 * MIB
"""Viewers cannot open larger traces: at this size the file is closed properly and the rest is dropped."""

SHORTEST_WAIT_S: Final = 20e-6
"""A shorter wait is the cost of the request, not a wait for another member."""

_RESOURCES_SORT: Final = 2**30
"""Below all members, which are ordered by job id."""

_encode: Final = json.JSONEncoder(separators=(",", ":")).encode  # made once: json.dumps would make one each time


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


class Trace:
    """Takes events cheaply from several threads and writes them to a new file when told.

    The trace is one process row, named after the group, with a thread track for each member. A `shared` one has a track
    for each resource, too, showing who holds it: in a group each has one holder at a time. Each flush leaves whole
    events, so that a reader that accepts a missing "]", as Perfetto does, can read the trace of a killed runtime.

    Raises:
        UsageError: The file cannot be written.
    """

    def __init__(self, path: Path, group: str, *, shared: bool = True) -> None:
        self.path = path
        self.dropped = 0  # events lost because `flush` was not called or the file grew too large
        self._shared = shared
        self.pending: deque[tuple[Callable[..., list[str]], tuple[Any, ...]]] = deque()
        self._lock = threading.RLock()
        self._written_bytes = 0
        self._epoch_offset_s = time.time() - time.perf_counter()
        self._pid = os.getpid()
        self._tracks: dict[tuple[str, str, int], int] = {}
        self._lanes: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)  # of a member: last end and thread
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write the trace {path}: {error.strerror}; name a file in a directory") from error
        origin = {"name": group, "host": socket.gethostname(), "group": group}
        self._write("[\n" + self._metadata("process_name", 0, origin)[len(",\n") :])

    def record(self, member: str, stage: str, start_s: float, end_s: float, wait_s: float) -> None:
        """Note a stage of a member, or of "solo", on the `time.perf_counter` clock; it waited `wait_s` before."""
        self._append(self._stretch, member, stage, start_s, end_s, wait_s, threading.get_ident())

    def iteration(self, member: str, iteration: int) -> None:
        """Note that a member's iteration with that number, counted from 1, ends now."""
        self._append(self._mark, member, iteration, time.perf_counter())

    def flush(self) -> None:
        """Write what was noted since the last call."""
        with self._lock:
            parts: list[str] = []
            for _ in range(len(self.pending)):
                form, event = self.pending.popleft()
                parts += form(*event)
            if self._file.closed:
                self.dropped += len(parts)
                return
            if parts:
                self._write("".join(parts))
            if self._written_bytes > LARGEST_TRACE_BYTES and not self._file.closed:
                self._end()
                logger.warning("the trace %s ends here: it has reached %d MiB", self.path, self._written_bytes >> 20)

    def close(self) -> None:
        """Write the rest and close the file; later events are dropped."""
        with self._lock:
            self.flush()
            if not self._file.closed:
                self._end()
                if self.dropped:
                    logger.warning("the trace %s lacks %d events: they came too fast", self.path, self.dropped)

    def _append(self, form: Callable[..., list[str]], *event: Any) -> None:
        if len(self.pending) < MOST_PENDING:
            self.pending.append((form, event))
        else:
            self.dropped += 1

    def _end(self) -> None:
        self._write("\n]\n")
        self._file.close()

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

    def _stretch(self, member: str, stage: str, start_s: float, end_s: float, wait_s: float, thread: int) -> list[str]:
        resource = RESOURCES[STAGES.index(stage)]
        waited_s = wait_s if wait_s >= SHORTEST_WAIT_S else 0.0
        asked_us, start_us, end_us = map(self._epoch_us, (start_s - waited_s, start_s, end_s))
        lines, tid = self._thread("member", member, self._lane(member, thread, asked_us, end_us))
        if waited_s:
            lines.append(self._slice(f"wait for {resource}", tid, asked_us, start_us, {}))
        lines.append(self._slice(stage, tid, start_us, end_us, {"wait_ms": round(wait_s * 1e3, 3)}))
        if self._shared:
            # A stretch that ended at a yield point is recorded after that of the member that went first: one lane.
            declared, holder_tid = self._thread("resource", resource, 0)
            lines += [*declared, self._slice(f"job {member}", holder_tid, start_us, end_us, {"stage": stage})]
        return lines

    def _mark(self, member: str, iteration: int, at_s: float) -> list[str]:
        lines, tid = self._thread("member", member, 0)
        mark = {"name": f"iteration {iteration}", "cat": "iteration", "ph": "i", "s": "t", "tid": tid}
        return [*lines, self._event(mark, self._epoch_us(at_s))]

    def _lane(self, member: str, thread: int, start_us: int, end_us: int) -> int:
        """The lane of a slice: its thread's own, else one that is free; slices on one lane must not cross."""
        lanes = self._lanes[member]
        free = [index for index, (until_us, _) in enumerate(lanes) if until_us <= start_us]
        lane = next((index for index in free if lanes[index][1] == thread), (*free, len(lanes))[0])
        lanes[lane : lane + 1] = [(end_us, thread)]
        return lane

    def _thread(self, kind: str, name: str, lane: int) -> tuple[list[str], int]:
        """Return the lines that declare a track's lane, where it is new, and its thread id."""
        tid = self._tracks.get((kind, name, lane))
        if tid is not None:
            return [], tid
        tid = self._tracks[kind, name, lane] = len(self._tracks) + 1
        if kind == "resource":
            title, order = f"{name}: held by", _RESOURCES_SORT + RESOURCES.index(name)
        else:
            title, order = f"job {name}", int(name) if name.isdecimal() else tid
        title += f", thread {lane + 1}" if lane else ""
        return [
            self._metadata("thread_name", tid, {"name": title}),
            self._metadata("thread_sort_index", tid, {"sort_index": order}),
        ], tid

    def _epoch_us(self, at_s: float) -> int:
        return round((at_s + self._epoch_offset_s) * 1e6)

    def _slice(self, name: str, tid: int, start_us: int, end_us: int, arguments: Mapping[str, object]) -> str:
        fields = {"name": name, "cat": "stage", "ph": "X", "tid": tid, "args": arguments, "dur": end_us - start_us}
        return self._event(fields, start_us)

    def _event(self, fields: Mapping[str, object], at_us: int) -> str:
        return ",\n" + _encode({**fields, "pid": self._pid, "ts": at_us})

    def _metadata(self, name: str, tid: int, arguments: Mapping[str, object]) -> str:
        return ",\n" + _encode({"name": name, "ph": "M", "pid": self._pid, "tid": tid, "args": arguments})
