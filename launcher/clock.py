"""Measures the stages of one training script and, inside a group, asks for their resources."""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from muri.profiler.records import STAGES

STAGE_COUNT: Final = len(STAGES)
PROPAGATE: Final = STAGES.index("propagate")
RECENT_ITERATIONS: Final = 50


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """What one iteration took.

    Attributes:
        iteration_s: Wall-clock seconds, waits for resources included.
        stage_s: Seconds per stage in the order of `STAGES`, waits excluded.
        wait_s: Seconds spent waiting for each stage's resource.
    """

    iteration_s: float
    stage_s: tuple[float, ...]
    wait_s: tuple[float, ...]

    @property
    def busy_s(self) -> float:
        """What the iteration would have taken without waiting for resources."""
        return max(0.0, self.iteration_s - sum(self.wait_s))


class Gate(Protocol):
    """Grants the resources of stages; the runtime gives one to each session."""

    def acquire(self, stage: int) -> float:
        """Wait for the stage's resource; returns the seconds waited."""

    def release(self, stage: int) -> None:
        """Give the stage's resource back."""

    def yield_point(self, stage: int) -> float:
        """Let a member that is further behind go first; returns the seconds waited."""

    def iteration_done(self, record: IterationRecord) -> None:
        """Note that an iteration ended."""


class OpenGate:
    """The gate of a script that runs alone: every resource is free."""

    def acquire(self, stage: int) -> float:
        """Grant at once."""
        return 0.0

    def release(self, stage: int) -> None:
        """Nothing to give back."""

    def yield_point(self, stage: int) -> float:
        """Nobody to yield to."""
        return 0.0

    def iteration_done(self, record: IterationRecord) -> None:
        """Nobody counts."""


IntervalListener = Callable[[int, float, float, float], None]
IterationListener = Callable[[IterationRecord], None]


def wait_for_gpu() -> None:
    """Wait until the GPU has done what this thread asked of it.

    Kernels run asynchronously: without this a stage would seem to end when its kernels are
    queued, and the GPU would be passed on while it is still busy.
    """
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized() and not cuda.is_current_stream_capturing():
        cuda.current_stream().synchronize()


class StageClock:
    """Stage and iteration times of one script.

    One thread owns the clock: the one that iterates `muri.batches`, else the first to mark a
    stage. Its stages are gated. Stages in other threads (prefetching) are timed but not gated.

    Attributes:
        stage_s: Total seconds per stage, in the order of `STAGES`.
        wait_s: Total seconds of waiting for each stage's resource.
        iterations: Iterations done.
        recent: The last iterations' records.
    """

    def __init__(
        self,
        gate: Gate | None = None,
        on_interval: IntervalListener | None = None,
        on_iteration: IterationListener | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.stage_s = [0.0] * STAGE_COUNT
        self.wait_s = [0.0] * STAGE_COUNT
        self.iterations = 0
        self.recent: deque[IterationRecord] = deque(maxlen=RECENT_ITERATIONS)
        self._gate: Gate = gate or OpenGate()
        self._on_interval = on_interval
        self._on_iteration = on_iteration
        self._now = now
        self._owner: int | None = None
        self._stack: list[int] = []
        self._since_s = 0.0
        self._waited_s = 0.0
        self._by_batches = False
        self._first_stage: int | None = None
        self._iteration_start_s: float | None = None
        self._iteration_stage_s = [0.0] * STAGE_COUNT
        self._iteration_wait_s = [0.0] * STAGE_COUNT
        self._elsewhere = threading.local()
        self._elsewhere_lock = threading.Lock()

    def enter(self, stage: int) -> None:
        """Begin a stage; a stage inside another suspends the outer one.

        The same stage inside itself is a yield point: a long stage can let others go first.
        """
        if not self._owned():
            self._enter_elsewhere(stage)
            return
        if self._stack and self._stack[-1] == stage:
            self._yield(stage)
            self._stack.append(stage)
            return
        if self._stack:
            self._suspend(self._stack[-1])
        elif not self._by_batches:
            self._boundary_by_first_stage(stage)
        self._resume(stage)
        self._stack.append(stage)

    def leave(self) -> None:
        """End the innermost stage; the outer one, if any, goes on."""
        if not self._owned():
            self._leave_elsewhere()
            return
        if not self._stack:  # the stage was entered before this clock was in charge
            return
        stage = self._stack.pop()
        if self._stack and self._stack[-1] == stage:
            return
        self._suspend(stage)
        if self._stack:
            self._resume(self._stack[-1])

    def yield_point(self) -> None:
        """Let a member that is further behind use the current stage's resource first."""
        if self._stack and self._owned():
            self._yield(self._stack[-1])

    def ask_batch(self) -> None:
        """The loop asks for its next batch: one iteration ends, the next begins."""
        self._owner = threading.get_ident()
        if not self._by_batches:
            self._by_batches = True
            self._iteration_start_s = None
        self.end_iteration()
        self._begin_iteration()

    def end_iteration(self) -> None:
        """Close the open iteration and count it."""
        start_s = self._iteration_start_s
        if start_s is None:
            return
        record = IterationRecord(self._now() - start_s, tuple(self._iteration_stage_s), tuple(self._iteration_wait_s))
        self._iteration_start_s = None
        self.iterations += 1
        self.recent.append(record)
        self._gate.iteration_done(record)
        if self._on_iteration is not None:
            self._on_iteration(record)

    def drop_iteration(self) -> None:
        """Forget the open iteration: there was no batch left for it."""
        self._iteration_start_s = None

    def recent_iteration_s(self) -> float | None:
        """Mean wall-clock seconds of the last iterations, None before the first."""
        recent = list(self.recent)
        return sum(record.iteration_s for record in recent) / len(recent) if recent else None

    def _owned(self) -> bool:
        ident = threading.get_ident()
        if self._owner is None:
            self._owner = ident
        return self._owner == ident

    def _begin_iteration(self) -> None:
        self._iteration_start_s = self._now()
        self._iteration_stage_s = [0.0] * STAGE_COUNT
        self._iteration_wait_s = [0.0] * STAGE_COUNT

    def _boundary_by_first_stage(self, stage: int) -> None:
        if self._first_stage is None:
            self._first_stage = stage
        if stage == self._first_stage:
            self.end_iteration()
            self._begin_iteration()

    def _resume(self, stage: int) -> None:
        self._note_wait(stage, self._gate.acquire(stage))
        self._since_s = self._now()

    def _suspend(self, stage: int) -> None:
        if stage == PROPAGATE:
            wait_for_gpu()
        self._close_interval(stage)
        self._gate.release(stage)

    def _yield(self, stage: int) -> None:
        if stage == PROPAGATE:
            wait_for_gpu()
        before_s = self._now()
        waited_s = self._gate.yield_point(stage)
        if waited_s > 0:
            self._close_interval(stage, before_s)
            self._note_wait(stage, waited_s)
            self._since_s = self._now()

    def _close_interval(self, stage: int, end_s: float | None = None) -> None:
        end_s = self._now() if end_s is None else end_s
        held_s = end_s - self._since_s
        self.stage_s[stage] += held_s
        self._iteration_stage_s[stage] += held_s
        if self._on_interval is not None:
            self._on_interval(stage, self._since_s, end_s, self._waited_s)

    def _note_wait(self, stage: int, waited_s: float) -> None:
        self._waited_s = waited_s
        self.wait_s[stage] += waited_s
        self._iteration_wait_s[stage] += waited_s

    def _enter_elsewhere(self, stage: int) -> None:
        stack = self._elsewhere.__dict__.setdefault("stack", [])
        stack.append((stage, self._now()))

    def _leave_elsewhere(self) -> None:
        stack = self._elsewhere.__dict__.get("stack")
        if not stack:
            return
        stage, since_s = stack.pop()
        with self._elsewhere_lock:
            held_s = self._now() - since_s
            self.stage_s[stage] += held_s
            self._iteration_stage_s[stage] += held_s
