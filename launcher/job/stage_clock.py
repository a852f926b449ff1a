"""Measures the stages of one training script and, inside a group, asks for their resources.

Kernels on a GPU run later than the script asks for them; a pace tells the clock when the GPU is really used.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Final

from muri.launcher.job.time_ledger import NOBODY, OUTSIDE, TimeLedger
from muri.profiler.records import STAGES

STAGE_COUNT: Final = len(STAGES)
LOAD: Final = STAGES.index("load")
PREPROCESS: Final = STAGES.index("preprocess")
PROPAGATE: Final = STAGES.index("propagate")
SYNCHRONIZE: Final = STAGES.index("synchronize")
TURNS_INDEX: Final = STAGE_COUNT
"""Of the bytes that tell gates who waits, one per resource, the one behind them: whether members take turns."""
TURNS: Final = 0
NO_TURNS: Final = 1
SOLE_MEMBER: Final = 2
"""There is no other member for now: nothing is asked for, but stages are measured as under turns."""

RECENT_ITERATIONS: Final = 50


@dataclass(frozen=True)
class GpuTimes:
    """Seconds that a member's finished kernels had the GPU, and that they waited there for another member's."""

    held_s: float = 0.0
    wait_s: float = 0.0


class HostPace:
    """The thread waits for the GPU before it passes it on: always, or only while members take `turns`.

    The clock calls it around the stage `propagate`, never while the arbiter's state changes.
    """

    counts_host_time = True  # else `iteration_ended` tells how long the GPU was busy
    gpu_mem_peak_gib: float | None = None  # most that the member was seen to use, None where it is not measured

    def __init__(self, turns: Gate | None = None) -> None:
        self._turns = turns

    def before(self) -> None:
        """The GPU is about to be asked for; nothing is held."""

    def taken(self) -> None:
        """The GPU was granted."""

    def given(self) -> None:
        """The GPU is about to be passed on."""
        if self._turns is None or self._turns.takes_turns:
            wait_for_gpu()

    def at_yield_point(self) -> bool:
        """Return whether the GPU may be passed on within a stage; if so, `taken` follows."""
        if self._turns is not None and not self._turns.takes_turns:
            return False
        wait_for_gpu()
        return True

    def iteration_ended(self) -> GpuTimes:
        """Return the times that have become known since the last call."""
        return GpuTimes()


def wait_for_gpu() -> None:
    """Wait until the GPU has done what this thread asked of it.

    Kernels run asynchronously: without this a stage would seem to end when its kernels are
    queued, and the GPU would be passed on while it is still busy.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized() and not cuda.is_current_stream_capturing():
        cuda.current_stream().synchronize()


@dataclass(frozen=True)
class IterationRecord:
    """The times of one iteration."""

    iteration_s: float  # wall-clock, waits for resources included
    stage_s: tuple[float, ...]  # owned by each stage, without waits; together at most the iteration
    wait_s: tuple[float, ...]  # waits for each stage's resource

    @property
    def busy_s(self) -> float:
        """The iteration's time without waits for resources."""
        return max(0.0, self.iteration_s - sum(self.wait_s))


class Gate:
    """Grants the resources of stages; this one, of a script that runs alone, grants every resource at once."""

    @property
    def asks(self) -> bool:
        """Whether a stage may have to wait, as things are now."""
        return False

    @property
    def takes_turns(self) -> bool:
        """Whether members wait for each other, or would if there were another one."""
        return self.asks

    def acquire(self, stage: int) -> float:
        """Wait for the stage's resource; return the seconds waited."""
        return 0.0

    def release(self, stage: int) -> None:
        """Give the stage's resource back."""

    def yield_point(self, stage: int) -> float:
        """Let a member that is further behind go first; return the seconds waited."""
        return 0.0

    def iteration_done(self, record: IterationRecord) -> None:
        """Note that an iteration ended."""


IntervalListener = Callable[[int, float, float, float], None]
IterationListener = Callable[[IterationRecord], None]
HoldListener = Callable[[int, float, float, float, bool], None]
"""Called with a stage, its start and end, its share of the resource, and whether it was the owner's."""


class _Lane:
    """The stages of one thread that waits for resources: innermost last, and since when that one runs."""

    __slots__ = ("left_s", "since_s", "stack", "waited_s")

    def __init__(self) -> None:
        self.stack: list[int] = []
        self.since_s = self.left_s = self.waited_s = 0.0


class _ThreadPart(threading.local):
    """A thread other than the owner: its lane while its stages are gated, else its stages, each with its start."""

    def __init__(self) -> None:
        self.lane: _Lane | None = None
        self.ungated: list[tuple[int, float]] = []


class StageClock:
    """Stage and iteration times of one script.

    One thread owns the clock: the one that iterates `muri.batches`, else the first to mark a stage. Its stages are
    gated, and so are those of a thread within `lane()`. Stages in other threads are timed but not gated. Each second
    belongs to one stage at most; see `TimeLedger`.
    """

    def __init__(
        self,
        gate: Gate | None = None,
        on_interval: IntervalListener | None = None,
        now: Callable[[], float] = time.perf_counter,
        cpu_now: Callable[[], float] = time.thread_time,
    ) -> None:
        self.explicit = False  # the script marked a stage or iterated `muri.batches` itself; hooks no longer do
        self.steps = False  # the script says itself where its iterations end, by `muri.step`; nothing else does
        # Called by the owner at each iteration boundary, after the iteration was counted and with no resource held.
        self.at_boundary: list[Callable[[], None]] = []
        self._ledger = TimeLedger(now())
        self.stage_s = self._ledger.total_s  # total seconds that each stage owned
        self.hidden_s = self._ledger.hidden_s  # total seconds that other threads spent behind another stage
        # Whether time that the owner computes outside of stages is `preprocess`: hooks see no stage there, and such a
        # part uses the CPU. A script that marks its stages itself says which is which.
        self.explains_gaps = False
        self.wait_s = [0.0] * STAGE_COUNT  # total seconds of waiting for each stage's resource
        self.iterations = 0
        self.recent: deque[IterationRecord] = deque(maxlen=RECENT_ITERATIONS)  # the last iterations
        self.gpu = HostPace()
        self.on_record: IterationListener | None = None  # each iteration whose times count, by the counting thread
        self.on_hold: HoldListener | None = None  # all work, also of threads that are not gated and of workers
        # Takes how many batches a loader may have ready, and after how many its waits recur.
        self.on_prefetch_depth: Callable[[int, int], None] | None = None
        self.shared = gate is not None  # whether another member could wait for this script's resources
        self._gate = gate or Gate()
        self._on_interval = on_interval
        self.now = now
        self._cpu_now = cpu_now
        self._gap_since_s = 0.0  # since when the owner is in no stage
        self._gap_cpu_s: float | None = None  # its CPU time by then
        self._gap_after: int | None = None  # the stage that it left
        self._owner: int | None = None
        self._own = _Lane()
        self._thread = _ThreadPart()
        self._by_batches = False
        self._first_stage: int | None = None
        self._iteration_start_s: float | None = None
        self._iteration_wait_s = [0.0] * STAGE_COUNT
        self._sums = threading.Lock()
        self._paused_within = False

    def enter(self, stage: int, *, joins: bool = False) -> None:
        """Begin a stage; a stage inside another suspends the outer one.

        The same stage inside itself is a yield point: a long stage can let others go first. If it `joins`, the time
        since the thread left the same stage belongs to it, if there was no other since: between forward and backward
        the loss is computed. Nothing is held meanwhile.
        """
        lane = self._gated()
        if lane is None:
            now_s = self.now()
            self._thread.ungated.append((stage, now_s))
            self._ledger.beside(stage, 1, now_s)
            return
        stack = lane.stack
        if stack and stack[-1] == stage:
            self._yield(lane, stage)
            stack.append(stage)
            return
        if stack:
            self._suspend(lane, stack[-1])
        elif lane is self._own and not self._by_batches:
            if self._first_stage is None:
                self._first_stage = stage
            if stage == self._first_stage:
                self._end_iteration()
                self._begin_iteration()
        if lane is self._own and not stack:
            self._end_gap(self.now(), joined=stage if joins else None)
        self._resume(lane, stage)
        stack.append(stage)

    def leave(self) -> None:
        """End the innermost stage; an outer one continues."""
        lane = self._gated()
        if lane is None:
            if self._thread.ungated:
                stage, since_s = self._thread.ungated.pop()
                now_s = self.now()
                self._ledger.beside(stage, -1, now_s)
                self.note_work(stage, since_s, now_s, 1.0)
            return
        if not lane.stack:  # the stage was entered before this clock was in charge
            return
        stage = lane.stack.pop()
        if lane.stack and lane.stack[-1] == stage:
            return
        self._suspend(lane, stage)
        if lane.stack:
            self._resume(lane, lane.stack[-1])
        elif lane is self._own:
            self._begin_gap(lane.left_s, after=stage)

    def yield_point(self) -> None:
        """Let a member that is further behind use the current stage's resource first."""
        lane = self._gated()
        if lane is not None and lane.stack:
            self._yield(lane, lane.stack[-1])

    @contextlib.contextmanager
    def lane(self) -> Iterator[None]:
        """Gate the calling thread's stages like the owner's: own stages and waits, the same member.

        For threads that do part of the script's work beside the loop, such as prefetching or communication. Without
        effect in the thread that owns the clock. On the way out stages that are still open are ended.
        """
        if self._thread.lane is not None or self._owner == threading.get_ident():
            yield
            return
        lane = self._thread.lane = _Lane()
        try:
            yield
        finally:
            self._thread.lane = None
            if lane.stack:
                self._suspend(lane, lane.stack[-1])

    @contextlib.contextmanager
    def suspended(self, *, owner: bool = False) -> Iterator[None]:
        """Give the current stage's resource back while the thread only waits, and take it again after.

        With `owner` it is the owner's stage: the owner is blocked in C++, and the caller works on its behalf.
        """
        lane = self._own if owner else self._gated()
        if lane is None or not lane.stack:
            yield
            return
        self._suspend(lane, lane.stack[-1])
        try:
            yield
        finally:
            self._resume(lane, lane.stack[-1])

    @property
    def takes_turns(self) -> bool:
        """Whether stages that begin now may have to wait for another member's."""
        return self._gate.asks

    def become_explicit(self) -> None:
        """Forget how hooks told iterations apart, because the script marks its stages itself."""
        self.explicit = True
        self.explains_gaps = False
        if self.steps:
            return
        self._by_batches = False
        self._first_stage = None
        self._iteration_start_s = None

    def move(self, stage: int, target: int, seconds: float) -> None:
        """Let time that the owner spent in a stage of this iteration belong to another one."""
        if self._gated() is self._own:
            self._ledger.move(stage, target, seconds)

    def begin_fetch_wait(self) -> bool:
        """Begin to wait for worker processes, which holds nothing; return whether `end_fetch_wait` must follow.

        It must not within a stage, whose time that is, and in threads other than the owner.
        """
        lane = self._gated()
        if lane is not self._own or lane.stack:
            return False
        now_s = self.now()
        self._end_gap(now_s)
        self._begin_gap(now_s)
        return True

    def end_fetch_wait(self, load_share: float) -> None:
        """End it; `load_share` of the time (0 to 1) is `load`, the rest `preprocess`, as the workers' time was."""
        now_s = self.now()
        claims = [0.0] * STAGE_COUNT
        claims[LOAD], claims[PREPROCESS] = load_share, 1.0 - load_share
        self._claim(now_s, claims)
        self._begin_gap(now_s)

    def note_work(self, stage: int, start_s: float, end_s: float, use: float, *, own: bool = False) -> None:
        """Report work that no mark shows, from `start_s` to `end_s` on `time.perf_counter`; it changes no sums.

        `use` is the share of the resource's peak, 0 to 1; `own` says that the loop's own thread did it, within another
        stage.
        """
        if self.on_hold is not None:
            self.on_hold(stage, start_s, end_s, use, own)

    def report_prefetch_depth(self, loader: Any, prefetched: int = 0) -> None:
        """Tell a dry run how many batches a loader may fetch ahead of the loop.

        A loader with workers has `num_workers` and `prefetch_factor`, as a `torch.utils.data.DataLoader`; `prefetched`
        batches are fetched ahead by a thread of the script.
        """
        if self.on_prefetch_depth is None:
            return
        workers, per_worker = getattr(loader, "num_workers", 0), getattr(loader, "prefetch_factor", None)
        workers = max(0, workers) if isinstance(workers, int) else 0
        per_worker = per_worker if isinstance(per_worker, int) else 1
        self.on_prefetch_depth(workers * per_worker + prefetched, max(1, workers))

    def add_wait(self, stage: int, waited_s: float) -> None:
        """Count a wait of the owner that a lane's wait for the stage's resource caused, in seconds."""
        with self._sums:
            self._iteration_wait_s[stage] += waited_s

    def ask_batch(self) -> None:
        """End one iteration and begin the next, when the loop asks for its next batch."""
        if not self.steps:
            self._next_iteration()

    def step(self) -> None:
        """End one iteration and begin the next, where the script says so."""
        self.steps = True
        self._next_iteration()

    def _next_iteration(self) -> None:
        ident = threading.get_ident()
        if self._owner != ident:
            self._owner = ident
            self._gap_cpu_s = None  # that of another thread says nothing
        if not self._by_batches:
            self._by_batches = True
            self._iteration_start_s = None
        self._end_iteration()
        self._begin_iteration()

    def end_iteration(self) -> None:
        """Close the open iteration and count it, unless the script says itself where iterations end."""
        if not self.steps:
            self._end_iteration()

    def _end_iteration(self) -> None:
        start_s = self._iteration_start_s
        if start_s is None:
            return
        now_s = self.now()
        if not self._own.stack:
            self._end_gap(now_s)
            self._begin_gap(now_s, after=self._gap_after)
        if not self.gpu.counts_host_time:
            times = self.gpu.iteration_ended()
            self._note_wait(self._own, PROPAGATE, times.wait_s)
            self._ledger.told(PROPAGATE, times.held_s, now_s - start_s - sum(self._iteration_wait_s), now_s)
        record = IterationRecord(now_s - start_s, self._ledger.settle(now_s), tuple(self._iteration_wait_s))
        self._iteration_start_s = None
        if self.count(record):
            self._gate.iteration_done(record)
        if self.at_boundary:
            self._call_at_boundary()

    def note_pause(self) -> None:
        """Keep no times of the iteration under way: a pause of the member fell into it."""
        self._paused_within = True

    def count(self, record: IterationRecord) -> bool:
        """Count a finished iteration; return False if its times say nothing about the script."""
        meaningful, self._paused_within = not self._paused_within, False
        self.iterations += 1
        if meaningful:
            self.recent.append(record)
            if self.on_record is not None:
                self.on_record(record)
        return meaningful

    def drop_iteration(self) -> None:
        """Forget the open iteration, because no batch was left for it."""
        if not self.steps:
            self._iteration_start_s = None

    def recent_iteration_s(self) -> float | None:
        """Mean wall-clock seconds of the last iterations, None before the first."""
        recent = list(self.recent)
        return sum(record.iteration_s for record in recent) / len(recent) if recent else None

    def _gated(self) -> _Lane | None:
        """The calling thread's lane, None if its stages are not gated."""
        lane = self._thread.lane
        if lane is not None:
            return lane
        ident = threading.get_ident()
        if self._owner is None:
            self._owner = ident
        return self._own if self._owner == ident else None

    def _call_at_boundary(self) -> None:
        stack = self._own.stack
        if stack:  # the loop runs inside a stage
            self._suspend(self._own, stack[-1])
        for function in list(self.at_boundary):
            function()
        if stack:
            self._resume(self._own, stack[-1])

    def _begin_iteration(self) -> None:
        now_s = self._iteration_start_s = self.now()
        self._ledger.begin_iteration(now_s)
        if not self._own.stack:
            self._begin_gap(now_s, after=self._gap_after)
        self._iteration_wait_s = [0.0] * STAGE_COUNT

    def _begin_gap(self, now_s: float, after: int | None = None) -> None:
        self._gap_since_s, self._gap_after = now_s, after
        self._gap_cpu_s = self._cpu_now() if self.explains_gaps else None

    def _end_gap(self, now_s: float, joined: int | None = None) -> None:
        """End the time in which the owner was in no stage; it is `joined`'s, or what was computed is `preprocess`."""
        claims, length_s = [0.0] * STAGE_COUNT, now_s - self._gap_since_s
        if length_s > 0 and self.gpu.counts_host_time:
            if joined is not None and joined == self._gap_after:
                claims[joined] = 1.0
            elif self._gap_cpu_s is not None and self.explains_gaps:
                claims[PREPROCESS] = min(1.0, max(0.0, (self._cpu_now() - self._gap_cpu_s) / length_s))
        self._claim(now_s, claims)

    def _claim(self, now_s: float, claims: Sequence[float]) -> None:
        self._ledger.end_gap(now_s, claims)
        if self.on_hold is None:
            return
        at_s, length_s = self._gap_since_s, now_s - self._gap_since_s
        for stage, claim in enumerate(claims):
            if claim > 0 and length_s > 0:
                self.on_hold(stage, at_s, at_s + claim * length_s, 1.0, True)
                at_s += claim * length_s

    def _resume(self, lane: _Lane, stage: int) -> None:
        if lane is self._own:
            self._ledger.own(NOBODY, self.now())
        if stage == PROPAGATE:
            self.gpu.before()
        self._note_wait(lane, stage, self._gate.acquire(stage))
        if stage == PROPAGATE:
            self.gpu.taken()
        lane.since_s = self.now()
        self._tell_ledger_of_work(lane, stage, lane.since_s)

    def _tell_ledger_of_work(self, lane: _Lane, stage: int, now_s: float) -> None:
        if lane is not self._own:
            self._ledger.beside(stage, 1, now_s)
        else:
            self._ledger.own(stage if stage != PROPAGATE or self.gpu.counts_host_time else NOBODY, now_s)

    def _suspend(self, lane: _Lane, stage: int) -> None:
        if stage == PROPAGATE:
            self.gpu.given()
        lane.left_s = self.now()
        self._close_interval(lane, stage, lane.left_s)
        if lane is self._own:
            self._ledger.own(OUTSIDE, lane.left_s)
        else:
            self._ledger.beside(stage, -1, lane.left_s)
        self._gate.release(stage)

    def _yield(self, lane: _Lane, stage: int) -> None:
        if not self.shared or (stage == PROPAGATE and not self.gpu.at_yield_point()):
            return
        before_s = self.now()
        if lane is self._own:
            self._ledger.own(NOBODY, before_s)
        else:
            self._ledger.beside(stage, -1, before_s)
        waited_s = self._gate.yield_point(stage)
        if stage == PROPAGATE:
            self.gpu.taken()
        after_s = self.now()
        if waited_s > 0:
            self._close_interval(lane, stage, before_s)
            self._note_wait(lane, stage, waited_s)
            lane.since_s = after_s
        self._tell_ledger_of_work(lane, stage, after_s)

    def _close_interval(self, lane: _Lane, stage: int, end_s: float) -> None:
        if self._on_interval is not None:
            self._on_interval(stage, lane.since_s, end_s, lane.waited_s)
        if self.on_hold is not None:
            self.on_hold(stage, lane.since_s, end_s, 1.0, lane is self._own)

    def _note_wait(self, lane: _Lane, stage: int, waited_s: float) -> None:
        lane.waited_s = waited_s
        with self._sums:
            self.wait_s[stage] += waited_s
            if lane is self._own:  # the loop does not wait when a lane does
                self._iteration_wait_s[stage] += waited_s
