"""The stage trace of a script or a group: as Chrome trace events, or as JSON lines.

Whoever records calls `record`, which only appends a tuple; `flush` formats and writes, beside the members.
"""

import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from pathlib import Path
from typing import Final, NamedTuple

from muri.errors import UsageError

logger = logging.getLogger("muri.launcher")

MOST_PENDING: Final = 50_000
"""Events that are kept in memory between two flushes; beyond that they are counted and dropped."""

LARGEST_TRACE_BYTES: Final = 512 * 1024**2
"""Nothing opens larger traces: after that the file is closed properly and the rest is dropped."""


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


class Trace(ABC):
    """Takes events cheaply from several threads and writes them when told.

    Attributes:
        path: The file that is written; an existing one is replaced.
        dropped: Events that were lost because nobody flushed or the file grew too large.

    Raises:
        UsageError: The file cannot be written.
    """

    def __init__(self, path: Path, largest_bytes: int = LARGEST_TRACE_BYTES) -> None:
        self.path = path
        self.dropped = 0
        self._pending: deque[Stretch | IterationMark] = deque()
        self._lock = threading.Lock()
        self._largest_bytes = largest_bytes
        self._written_bytes = 0
        self._epoch_offset_s = time.time() - time.perf_counter()
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write the trace {path}: {error.strerror}; name a file in a directory") from error

    def record(self, member: str, stage: str, start_s: float, end_s: float, wait_s: float) -> None:
        """Note one stretch.

        Args:
            member: The member's job id, or "solo".
            stage: Name of the stage.
            start_s: Start on the `time.perf_counter` clock.
            end_s: End on the same clock.
            wait_s: How long the member waited for the resource before the start.
        """
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

    def _epoch_s(self, at_s: float) -> float:
        return at_s + self._epoch_offset_s

    def _epoch_us(self, at_s: float) -> int:
        return round(self._epoch_s(at_s) * 1e6)

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
        if self._written_bytes > self._largest_bytes:
            self._write(self._ending())
            self._file.close()
            logger.warning("the trace %s ends here: it has reached %d MiB", self.path, self._written_bytes >> 20)

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()
        self._written_bytes += len(text)


class LinesTrace(Trace):
    """One line `{"member", "stage", "start_s", "end_s", "wait_s"}` for each stretch, in seconds since the epoch."""

    def _format(self, event: Stretch | IterationMark) -> list[str]:
        if isinstance(event, IterationMark):
            return []
        fields = {
            "member": event.member,
            "stage": event.stage,
            "start_s": round(self._epoch_s(event.start_s), 6),
            "end_s": round(self._epoch_s(event.end_s), 6),
            "wait_s": round(event.wait_s, 6),
        }
        return [json.dumps(fields) + "\n"]


def open_trace(path: Path, group: str, *, shared: bool = True) -> Trace:
    """Start a trace: JSON lines when the file's name ends with .jsonl, else Chrome trace events.

    Args:
        path: The file.
        group: What the row of the trace is called.
        shared: Whether members share resources, so that it matters who holds them.

    Raises:
        UsageError: The file cannot be written.
    """
    if path.suffix == ".jsonl":
        return LinesTrace(path)
    from muri.launcher.telemetry.chrome_trace import ChromeTrace  # (it imports this module)

    return ChromeTrace(path, group, shared=shared)
