"""Between a script's stages and the arbiter: takes signals, and shields the arbiter from them."""

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from muri.launcher import isolation
from muri.launcher.arbitration.arbiter import Arbiter, WaitInterruptedError
from muri.launcher.clock import IterationRecord
from muri.profiler.records import STAGES

if TYPE_CHECKING:
    from muri.launcher.session import Session

PROPAGATE: Final = STAGES.index("propagate")


class SessionGate:
    """Asks the arbiter for a session's resources and takes signals in between."""

    def __init__(self, session: "Session", arbiter: Arbiter) -> None:
        self._session = session
        self._arbiter = arbiter
        self._member = session.member

    def acquire(self, stage: int) -> float:
        """Wait for the stage's resource; a signal may end the wait and the script."""
        return self._guarded(stage, self._arbiter.acquire)

    def release(self, stage: int) -> None:
        """Pass the resource on."""
        with self._session.shield_of_thread():
            if not self._session.ended.is_set():
                self._arbiter.release(self._member, stage)

    def yield_point(self, stage: int) -> float:
        """Let others go first, if they are further behind."""
        return self._guarded(stage, self._arbiter.yield_point)

    def iteration_done(self, record: IterationRecord) -> None:
        """Tell the arbiter."""
        with self._session.shield_of_thread():
            if not self._session.ended.is_set():
                self._arbiter.iteration_done(self._member, record)
        self._session.safe_point()

    def _guarded(self, stage: int, operation: Callable[[str, int], float]) -> float:
        self._session.safe_point()
        try:
            with self._session.shield_of_thread():
                waited_s = operation(self._member, stage)
        except WaitInterruptedError:
            self._session.safe_point()
            raise SystemExit(128 + signal.SIGTERM) from None
        if self._session.ended.is_set():  # a helper thread of a script that is over
            self._arbiter.release(self._member, stage)
        elif stage == PROPAGATE:
            isolation.on_propagate(self._session._state)
        self._session.safe_point()
        return waited_s
