"""The stage trace: one JSON line for every stretch of time that a member held a resource."""

import json
import threading
import time
from pathlib import Path


class StageTrace:
    """Appends `{"member", "stage", "start_s", "end_s", "wait_s"}` lines to a file, cheaply.

    Times are seconds since the epoch, so that traces of several processes line up. Lines are
    kept in memory until `flush`, which the runtime calls every second.

    Attributes:
        path: The file that is written; an existing one is replaced.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._file = path.open("w", encoding="utf-8")
        self._epoch_offset_s = time.time() - time.perf_counter()

    def record(self, member: str, stage: str, start_s: float, end_s: float, wait_s: float) -> None:
        """Note one stretch.

        Args:
            member: The member's job id, or "solo".
            stage: Name of the stage.
            start_s: Start on the `time.perf_counter` clock.
            end_s: End on the same clock.
            wait_s: How long the member waited for the resource before the start.
        """
        event = {
            "member": member,
            "stage": stage,
            "start_s": round(start_s + self._epoch_offset_s, 6),
            "end_s": round(end_s + self._epoch_offset_s, 6),
            "wait_s": round(wait_s, 6),
        }
        self._lines.append(json.dumps(event))

    def flush(self) -> None:
        """Write what was noted since the last call."""
        with self._lock:
            lines, self._lines = self._lines, []
            if lines and not self._file.closed:
                self._file.write("\n".join(lines) + "\n")
                self._file.flush()

    def close(self) -> None:
        """Write the rest and close the file; later stretches are dropped."""
        self.flush()
        with self._lock:
            self._file.close()
