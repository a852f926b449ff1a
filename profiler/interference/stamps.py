"""When the iterations of a running script end: the file that the script appends to and its reader."""

from pathlib import Path
from typing import Final

ITERATION_LOG_VARIABLE: Final = "MURI_ITERATION_LOG"
"""Names the file to which a script that runs alone appends a line for each iteration: when it ended, in seconds of
`time.perf_counter`, which all processes of a node share."""


class StampReader:
    """Reads what a script has appended since the last time.

    Attributes:
        stamps_s: All ends of iterations so far, in order.
    """

    def __init__(self, path: Path) -> None:
        self.stamps_s: list[float] = []
        self._path = path
        self._offset = 0

    def read(self) -> list[float]:
        """Read on; returns all stamps so far. A line that is still being written is left for the next time."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                text = stream.read()
        except FileNotFoundError:
            return self.stamps_s
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.stamps_s.extend(float(line) for line in whole.split())
        return self.stamps_s

    def between(self, start_s: float, end_s: float) -> list[float]:
        """The stamps from one time to another."""
        return [stamp for stamp in self.stamps_s if start_s <= stamp <= end_s]
