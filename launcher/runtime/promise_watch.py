"""Whether members get the speeds that they were promised, and what follows if one does not."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from muri.launcher.arbitration.arbiter import Arbiter
from muri.launcher.arbitration.switching import SwitchingArbiter

logger = logging.getLogger("muri.launcher")

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
