"""Keeps resources from a member while its job is suspended; the others go on and share what it leaves.

A paused member leaves the arbiter, as at its end, and joins it again when it is resumed: what it holds is free at once,
it is out of the rotation, and nobody counts it. It waits at its next stage or yield point. A stage that is under way
until then, or that a stopped process finishes after it was continued, overlaps with the others' stages once.
"""

import mmap
import threading
from collections import Counter
from collections.abc import MutableSequence, Sequence
from typing import Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.launcher.arbitration.arbiter import Arbiter, WaitInterruptedError
from muri.launcher.job.stage_clock import STAGE_COUNT, IterationRecord

EVERYWHERE: Final = frozenset(range(STAGE_COUNT))


class PausingArbiter(Arbiter):
    """An arbiter whose members can be paused.

    In a group of several ranks a member must pause between two collectives, at the same place on all ranks: a rank that
    does not come to one that the others are in keeps the network from all members. There it waits only for resources
    `pauses_at`, and stays in the arbiter.

    Args:
        inner: Passes the resources on.
        pauses_at: The resources that a paused member waits for.
        now: The clock.
    """

    def __init__(self, inner: Arbiter, pauses_at: frozenset[int] = EVERYWHERE, now: Clock = MACHINE_CLOCK) -> None:
        self._inner = inner
        super().__init__(now)
        self._pauses_at = pauses_at
        self._standing = threading.Lock()  # held while a member joins, leaves, is paused or resumed
        self._resumed = now.condition(self._mutex)
        self._terms: dict[str, tuple[float | None, float]] = {}
        self._paused: set[str] = set()
        self._interrupts: Counter[str] = Counter()
        self._asking: set[tuple[str, int]] = set()

    @property
    def pauses_everywhere(self) -> bool:
        """Whether a paused member may be stopped at any place."""
        return self._pauses_at == EVERYWHERE

    @property
    def takes_turns(self) -> bool:
        """As under the discipline in force."""
        return self._inner.takes_turns

    @property
    def waiting_hint(self) -> MutableSequence[int] | mmap.mmap:
        """The inner arbiter knows who waits."""
        return self._inner.waiting_hint

    @waiting_hint.setter
    def waiting_hint(self, hint: MutableSequence[int] | mmap.mmap) -> None:
        self._inner.waiting_hint = hint

    def pause(self, member: str) -> None:
        """Grant the member nothing until it is resumed."""
        with self._standing:
            if member not in self._terms or member in self._paused:
                return
            self._paused.add(member)  # first: whom `leave` wakes must find it
            if self.pauses_everywhere:
                self._inner.leave(member)

    def resume(self, member: str) -> None:
        """Let a paused member go on."""
        with self._standing:
            if member not in self._paused:
                return
            if self.pauses_everywhere:
                self._inner.join(member, *self._terms[member])
            self._end_pause(member)

    def keep_turns_for(self, member: str) -> None:
        """Pass it on."""
        self._inner.keep_turns_for(member)

    def join(self, member: str, solo_iteration_s: float | None = None, min_speed: float = 0.0) -> None:
        """Start a session."""
        with self._standing:
            self._inner.join(member, solo_iteration_s, min_speed)
            self._terms[member] = (solo_iteration_s, min_speed)

    def leave(self, member: str) -> None:
        """End the session, paused or not."""
        with self._standing:
            self._terms.pop(member, None)
            self._interrupts[member] += 1
            self._end_pause(member)
            self._inner.leave(member)

    def acquire(self, member: str, resource: int) -> float:
        """Wait for the end of the pause, and for the resource."""
        asking = self._begin_asking(member)
        try:
            return self._acquire(member, resource)
        finally:
            self._asking.discard(asking)

    def _acquire(self, member: str, resource: int) -> float:
        interrupts, paused_s = self._interrupts.get(member, 0), 0.0
        while True:
            if member in self._paused and resource in self._pauses_at:
                paused_s += self._await_resumption(member, interrupts)
            try:
                return paused_s + self._inner.acquire(member, resource)
            except WaitInterruptedError:
                if not self._was_pause(member, interrupts):
                    raise

    def release(self, member: str, resource: int) -> bool:
        """Pass the resource on, unless a pause has done so."""
        return self._inner.release(member, resource)

    def interrupt(self, member: str) -> None:
        """End the member's waits, also for the end of a pause."""
        with self._mutex:
            self._interrupts[member] += 1
            self._resumed.notify_all()
        self._inner.interrupt(member)

    def yield_point(self, member: str, resource: int) -> float:
        """Wait here while paused, if the resource may be given back within a stage."""
        interrupts = self._interrupts.get(member, 0)
        if not (member in self._paused and self.pauses_everywhere):
            asking = self._begin_asking(member)
            try:
                return self._inner.yield_point(member, resource)
            except WaitInterruptedError:
                if not self._was_pause(member, interrupts):
                    raise
            finally:
                self._asking.discard(asking)
        return self.acquire(member, resource)

    def holders(self) -> Sequence[str | None]:
        """Which member holds each resource."""
        return self._inner.holders()

    def obstructs(self, member: str) -> bool:
        """Whether another member waits for what this one holds."""
        return self._inner.obstructs(member)

    def waits(self, member: str) -> bool:
        """Whether a thread of the member waits here, for a resource or for the end of a pause."""
        return any(who == member for who, _ in list(self._asking))

    def _begin_asking(self, member: str) -> tuple[str, int]:
        """Note that the calling thread asks for a member; it is the caller's to discard what this returns."""
        asking = (member, threading.get_ident())
        self._asking.add(asking)
        return asking

    def iteration_done(self, member: str, record: IterationRecord) -> None:
        """Note that a member finished an iteration."""
        self._inner.iteration_done(member, record)

    def _was_pause(self, member: str, interrupts: int) -> bool:
        """Whether only a pause, which may be over, can have interrupted a wait that began with so many interrupts."""
        return member in self._terms and self._interrupts.get(member, 0) == interrupts

    def _await_resumption(self, member: str, interrupts: int) -> float:
        """Wait until the member is paused no more; returns the seconds.

        Raises:
            WaitInterruptedError: The wait was interrupted, or the session has ended.
        """
        start_s = self._now()
        with self._mutex:
            while member in self._paused and self._interrupts.get(member, 0) == interrupts:
                self._resumed.wait()
            if not self._was_pause(member, interrupts):
                raise WaitInterruptedError(member)
        return self._now() - start_s

    def _end_pause(self, member: str) -> None:
        with self._mutex:
            self._paused.discard(member)
            self._resumed.notify_all()
