"""Whose time passes: each instant of a script belongs to one stage at most, so shares never add up to more than 1.

The thread that runs the loop comes first. While it is in a stage, that stage owns the time, and what other threads do
is hidden behind it. While it is in none, which is called a gap, the stages of other threads own the time, in equal
parts. When a gap ends, the loop's thread may claim a part of it: it was computing then, or it waited for data.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from muri.profiler.records import STAGES

_COUNT: Final = len(STAGES)

OUTSIDE: Final = -1
"""The loop's thread is in no stage."""

NOBODY: Final = -2
"""The time belongs to no stage: it waits for a resource, or the GPU tells later how long it worked."""

NOTHING: Final = (0.0,) * _COUNT


class TimeLedger:
    """The seconds that each stage of one script owned; each change is told when it happens, by any thread."""

    def __init__(self, start_s: float) -> None:
        self.total_s = [0.0] * _COUNT  # owned since the script began
        self.iteration_s = [0.0] * _COUNT  # owned in the iteration under way
        self.hidden_s = [0.0] * _COUNT  # hidden behind other stages since the script began
        self._lock = threading.Lock()
        self._since_s = start_s
        self._own = OUTSIDE
        self._beside = [0] * _COUNT
        self._gap_s = 0.0
        self._gap_beside_s = [0.0] * _COUNT

    def own(self, state: int, now_s: float) -> None:
        """The loop's thread enters a stage, or one of the other states."""
        with self._lock:
            self._pass(now_s)
            self._end_gap(NOTHING)
            self._own = state

    def beside(self, stage: int, change: int, now_s: float) -> None:
        """Another thread enters a stage (1) or leaves it (-1)."""
        with self._lock:
            self._pass(now_s)
            self._beside[stage] += change

    def end_gap(self, now_s: float, claims: Sequence[float] = NOTHING) -> None:
        """End the gap, or one part of it; `claims` are the shares of the loop's own thread, together at most 1."""
        with self._lock:
            self._pass(now_s)
            self._end_gap(claims)

    def told(self, stage: int, used_s: float, within_s: float, now_s: float) -> None:
        """Count the seconds that the GPU worked for a stage; those during other stages' time are hidden.

        The iteration took `within_s`, without waits for resources.
        """
        with self._lock:
            self._pass(now_s)
            self._end_gap(NOTHING)
            owned_s = max(0.0, min(used_s, within_s - sum(self.iteration_s)))
            self._give(stage, owned_s)
            self.hidden_s[stage] += used_s - owned_s

    def move(self, stage: int, target: int, seconds: float) -> None:
        """Let a part of this iteration's time belong to another stage; at most what the stage has."""
        with self._lock:
            moved_s = min(seconds, self.iteration_s[stage])
            self._give(stage, -moved_s)
            self._give(target, moved_s)

    def begin_iteration(self, now_s: float) -> None:
        """Begin the accounts of an iteration; a gap before it belongs to none."""
        self.end_gap(now_s)
        with self._lock:
            self.iteration_s = [0.0] * _COUNT

    def settle(self, now_s: float) -> tuple[float, ...]:
        """The iteration's seconds up to now."""
        with self._lock:
            self._pass(now_s)
            return tuple(self.iteration_s)

    def _end_gap(self, claims: Sequence[float]) -> None:
        gap_s, beside_s = self._gap_s, self._gap_beside_s
        if gap_s <= 0:
            return
        self._gap_s, self._gap_beside_s = 0.0, [0.0] * _COUNT
        left = max(0.0, 1.0 - sum(claims))
        for stage, claim in enumerate(claims):
            self._give(stage, gap_s * claim + beside_s[stage] * left)
            self.hidden_s[stage] += beside_s[stage] * (1.0 - left)

    def _give(self, stage: int, seconds: float) -> None:
        self.iteration_s[stage] += seconds
        self.total_s[stage] += seconds

    def _pass(self, now_s: float) -> None:
        elapsed_s = now_s - self._since_s
        if elapsed_s <= 0:
            return
        self._since_s = now_s
        own = self._own
        if own >= 0:
            self._give(own, elapsed_s)
        elif own == OUTSIDE:
            self._gap_s += elapsed_s
        active = [stage for stage, threads in enumerate(self._beside) if threads > 0]
        for stage in active:
            if self._own == OUTSIDE:
                self._gap_beside_s[stage] += elapsed_s / len(active)
            elif stage != self._own:
                self.hidden_s[stage] += elapsed_s
