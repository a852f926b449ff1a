"""Measures members: a new model over its first iterations while it trains, and speeds against those promised.

The rules of the first are those of `muri.profiler.dryrun.course`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from muri.launcher.arbitration.arbiter import Arbiter
from muri.launcher.arbitration.switching import SwitchingArbiter
from muri.launcher.job.session import MemberSession
from muri.launcher.job.stage_clock import IterationRecord
from muri.profiler.dryrun.course import LiveCourse
from muri.profiler.dryrun.steadiness import LoaderAhead
from muri.profiler.records import ProfileDetail, ProfileError

logger = logging.getLogger("muri.launcher")

MOST_TURNS_S: Final = 600.0
"""So long a measurement may keep members in turns; one that is unsure by then goes on whenever it is undisturbed."""

_MOST_WAITING: Final = 10_000
"""Iterations that are kept until the script's process has told its facts; of more, the first ones are warm-up."""


class Measurement:
    """The measurement of one session.

    Its clock tells of iterations in any thread; one thread at a time looks.

    Args:
        session: The session; its clock tells nobody else of its iterations.
        is_undisturbed: Whether stages now take the time that they take alone.
        tells_early: Whether its first means are told, sure or not: nothing better is known of the model.
        now_s: The time, seconds since the epoch.
    """

    def __init__(
        self,
        session: MemberSession,
        is_undisturbed: Callable[[], bool],
        *,
        tells_early: bool = False,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._session = session
        self._is_undisturbed = is_undisturbed
        self._tells_early = tells_early
        self._now_s = now_s
        self._fresh: deque[tuple[IterationRecord, bool]] = deque(maxlen=_MOST_WAITING)
        self._course: LiveCourse | None = None
        self._result: dict[str, Any] | None = None
        self._over = False
        self._begun_s = now_s()
        session.clock.on_record = self._take

    @property
    def needs_turns(self) -> bool:
        """Whether members should take turns for it."""
        return not self._over and self._now_s() - self._begun_s < MOST_TURNS_S

    @property
    def is_awaited(self) -> bool:
        """Whether its first means are due soon, and others may wait for them."""
        return self._tells_early and self._result is None and self.needs_turns and self._session.clock.iterations > 0

    def look(self, *, ended: bool = False) -> dict[str, Any] | None:
        """The figures of a profile as plain JSON values, or an error; None before.

        Told early they change once, when they are sure.

        Args:
            ended: Whether the script has ended: what was measured by then has to do.
        """
        if self._over:
            return self._result
        facts = self._session.facts()
        if facts is not None:
            self._catch_up(facts)
        if ended or (self._course is not None and self._course.is_over):
            self._over, self._session.clock.on_record = True, None
            self._fresh.clear()
            self._result = (None if facts is None else self._sum_up(facts)) or self._result or self._why_not()
        elif facts is not None and self._tells_early and self._result is None and self._has_means():
            self._result = self._sum_up(facts)
        return self._result

    def _take(self, record: IterationRecord) -> None:
        self._fresh.append((record, self._is_undisturbed()))

    def _catch_up(self, facts: Mapping[str, Any]) -> None:
        ahead = LoaderAhead(int(facts.get("depth", 0)), max(1, int(facts.get("period", 1))))
        course = self._course or LiveCourse(ahead)
        while self._fresh and not course.is_over:
            record, undisturbed = self._fresh.popleft()
            if undisturbed:
                course.add(record.busy_s, record.stage_s)
            else:
                course = LiveCourse(ahead)
        self._course = course

    def _has_means(self) -> bool:
        return self._course is not None and self._course.has_means

    def _why_not(self) -> dict[str, Any] | None:
        """An error, where a script that has done all of its work told too little."""
        session = self._session
        if session.exit_code != 0 or session.lost:
            return None
        seen = session.clock.iterations
        return {"error": f"Muri saw {seen} of its iterations, too few to measure it", "at": self._now_s()}

    def _sum_up(self, facts: Mapping[str, Any]) -> dict[str, Any] | None:
        try:
            dangers = facts.get("dangers")
            detail = ProfileDetail(
                gradient_mib=facts.get("gradient_mib"), dangers=None if dangers is None else tuple(dangers)
            )
            gpu_mem_gib = float(facts.get("gpu_mem_gib") or 0.0)
            found = None if self._course is None else self._course.result(gpu_mem_gib, detail)
        except (ProfileError, TypeError, ValueError) as error:
            logger.warning("member %s: what was measured makes no sense: %s", self._session.member, error)
            return None
        if found is None:
            return None
        logger.info("member %s is measured: %s", self._session.member, found.stopped)
        said = {"accumulates": True} if facts.get("accumulates") else {}
        return {**found.to_dict(), "at": self._now_s(), "python": dict(self._session.python()), **said}


TOLERANCE: Final = 0.02
"""How far below its promise a member may be measured."""

PATIENCE_S: Final = 60.0
"""A promise that was missed for so long cannot be kept; one that was kept for so long after that can be."""


@dataclass(slots=True)
class PromiseWatch:
    """Compares a member's measured speed with its promise, look by look.

    Attributes:
        broken: The promise cannot be kept.
    """

    broken: bool = False
    _since_s: float | None = None

    def look(self, now_s: float, speed: float | None, promised: float) -> bool:
        """Note the speed; returns `broken`.

        Args:
            now_s: A monotonic clock.
            speed: The measured speed, None where it is not known, such as before the first iteration and in a pause.
            promised: The promise; 0: none.
        """
        if speed is None or (speed < promised - TOLERANCE) == self.broken:
            self._since_s = None
            return self.broken
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s >= PATIENCE_S:
            self.broken, self._since_s = not self.broken, None
        return self.broken


class PromiseKeeper:
    """Says which promises cannot be kept, and leaves lockstep for fair because of one.

    Under lockstep all members do the same number of iterations, so nobody can go first. `auto` changes the discipline
    by itself. `plain` cannot be left: its members have no turns.

    Args:
        arbiter: The group's arbiter.
        broken: Tells the members whose promise cannot be kept.
    """

    def __init__(self, arbiter: Arbiter, broken: Callable[[], list[str]]) -> None:
        self._arbiter = arbiter
        self._broken = broken
        self._told: frozenset[str] = frozenset()

    def look(self) -> None:
        """Look at the members once."""
        broken = frozenset(self._broken())
        for member in sorted(broken - self._told):
            logger.warning(
                "member %s does not get the speed that it was promised, under %s: the group takes no more members",
                member, self._arbiter.discipline,
            )  # fmt: skip
        for member in sorted(self._told - broken):
            logger.info("member %s gets the speed that it was promised again", member)
        self._told = broken
        if broken and self._arbiter.discipline == "lockstep" and isinstance(self._arbiter, SwitchingArbiter):
            self._arbiter.switch("fair", f"lockstep breaks the promise to {', '.join(sorted(broken))}")
