"""Whether a member hangs, when it runs on several ranks.

A script may wait long for its own peers, and hold the network meanwhile: rank 0 validates, the others wait at a
barrier. It hangs only if it is still on *all* ranks on which it runs (one that has ended is not one of them), and
in the way of others on at least one. Rank 0 collects what all ranks report, and decides.
"""

import threading
from dataclasses import dataclass
from typing import Final

MOST_LOOKS: Final = 3
"""A report that is older than so many looks of rank 0 says nothing any more."""

Run = tuple[str, str]
"""A member and its session's key, which is the same on all ranks."""


@dataclass(slots=True)
class _Report:
    spent_percent: int
    in_the_way: bool
    looks: int = 0

    @property
    def still(self) -> bool:
        return self.spent_percent >= 100 and self.looks <= MOST_LOOKS


class Stillness:
    """What the ranks have reported; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: dict[Run, dict[int, _Report]] = {}

    def report(self, rank: int, run: Run, spent_percent: int, *, in_the_way: bool) -> None:
        """A rank has looked at a session.

        Args:
            rank: The rank.
            run: The session.
            spent_percent: How much of its timeout it has been still for.
            in_the_way: Whether others wait for what it holds there.
        """
        with self._lock:
            self._reports.setdefault(run, {})[rank] = _Report(spent_percent, in_the_way)

    def left(self, rank: int, run: Run) -> None:
        """A session has ended on a rank."""
        with self._lock:
            reports = self._reports.get(run, {})
            reports.pop(rank, None)
            if not reports:
                self._reports.pop(run, None)

    def look(self) -> list[Run]:
        """The sessions that hang, each told once; called once for every look of rank 0."""
        with self._lock:
            hung = [run for run, reports in self._reports.items() if _hangs(list(reports.values()))]
            for run in hung:
                del self._reports[run]
            for reports in self._reports.values():
                for report in reports.values():
                    report.looks += 1
        return hung


def _hangs(reports: list[_Report]) -> bool:
    return all(report.still for report in reports) and any(report.in_the_way for report in reports)
