"""Speeds of a group's members: the runtime's own arbiter, driven in virtual time, once for each set of profiles.

Each member goes through its stages, asks the arbiter for every resource, offers it at yield points and gives it back,
as a runtime's sessions do.
"""

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

from muri.clock import Clock
from muri.launcher.arbitration.arbiter import Arbiter, Waiter
from muri.launcher.arbitration.disciplines import FairArbiter, LockstepArbiter
from muri.launcher.arbitration.switching import LEAST_GAIN, Node, candidates
from muri.launcher.job.stage_clock import PREPROCESS, STAGE_COUNT, IterationRecord
from muri.profiler.records import StageProfile

_WARM_UP: Final = 2
_ITERATIONS: Final = 64
_MOST_STEPS: Final = 20_000
_VARIATION: Final = 0.02
"""Greatest difference of a stage's time from its mean, from one iteration to the next.

Without it, two members would keep the rhythm that they fell into when they began. Under the fair discipline there may
be two of them, some 10 % apart; real members change from one to the other.
"""


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of a member alone."""

    stage_s: tuple[float, ...]  # Seconds in each stage
    iteration_s: float  # Seconds in all; what no stage covers needs no resource

    @property
    def rest_s(self) -> float:
        """Seconds that no stage covers."""
        return max(0.0, self.iteration_s - sum(self.stage_s))

    @classmethod
    def of(cls, profile: StageProfile) -> "Iteration":
        """The iteration that a profile describes."""
        return cls(tuple(profile.stage_s), profile.iteration_s)


@dataclass(frozen=True, slots=True)
class Sharing:
    """How members share."""

    discipline: str = "auto"  # "auto", "fair", "lockstep" or "plain"
    cpus: int = 1  # How many members preprocess at once: the CPUs that they have together
    piece_s: float = 0.05  # Seconds from one yield point to the next within a stage
    hand_over_s: float = 0.0003  # From the end of a stage to the beginning of one that waited for it
    overhead_s: float = 0.0004  # What each iteration of a member takes beside its stages
    contention: bool = True  # whether members without turns slow each other down; sleeping scripts do not
    has_gpu: bool = True  # Whether there is a GPU, which decides how `auto` begins


class _Suspended(Exception):  # noqa: N818 (it is not an error: the member waits)
    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter


class _Time(Clock):
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _Stepped(Arbiter):
    """An arbiter whose waits are told instead of slept."""

    def _await(self, waiter: Waiter) -> float:
        if waiter.granted:
            return 0.0
        raise _Suspended(waiter)


class _SteppedFair(_Stepped, FairArbiter):
    """The fair arbiter in steps."""


class _SteppedLockstep(_Stepped, LockstepArbiter):
    """The lockstep arbiter in steps."""


@dataclass(slots=True)
class _Member:
    name: str
    iteration: Iteration
    stage: int = -1
    left_s: float = 0.0
    waiter: Waiter | None = None
    asked_s: float = 0.0
    wait_s: list[float] = field(default_factory=lambda: [0.0] * STAGE_COUNT)
    stage_s: list[float] = field(default_factory=lambda: [0.0] * STAGE_COUNT)
    begun_s: float = 0.0
    iterations: int = 0
    worked_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def speed(self) -> float:
        """Return its measured speed without the warm-up."""
        return self.worked_s / (self.last_s - self.first_s) if self.last_s > self.first_s else 0.0


class _Drive:
    """Drives an arbiter through its members' iterations."""

    def __init__(self, arbiter: Arbiter, time: _Time, iterations: Sequence[Iteration], sharing: Sharing) -> None:
        self._arbiter, self._time, self._sharing = arbiter, time, sharing
        self._draw = random.Random("stages")
        self.members = [_Member(str(number), iteration) for number, iteration in enumerate(iterations, start=1)]
        self._due: list[tuple[float, int]] = [(0.0, number) for number in range(len(iterations))]
        for member in self.members:
            arbiter.join(member.name, member.iteration.iteration_s)

    def run(self) -> None:
        """Let members iterate until each has done enough."""
        for _ in range(_MOST_STEPS):
            if not self._due or all(member.iterations >= _ITERATIONS + _WARM_UP for member in self.members):
                return
            due_s, number = heapq.heappop(self._due)
            self._time.now_s = max(self._time.now_s, due_s)
            self._step(number)
            self._resume_granted()

    def _later(self, number: int, delay_s: float) -> None:
        heapq.heappush(self._due, (self._time.now_s + delay_s, number))

    def _resume_granted(self) -> None:
        for number, member in enumerate(self.members):
            if member.waiter is not None and member.waiter.granted:
                member.waiter = None
                member.wait_s[member.stage] += self._time.now_s - member.asked_s
                self._later(number, self._sharing.hand_over_s + self._piece(member))

    def _piece(self, member: _Member) -> float:
        return min(self._sharing.piece_s, member.left_s)

    def _step(self, number: int) -> None:
        """Go on with a member whose piece of work, or whose time outside of stages, has ended."""
        member = self.members[number]
        if member.stage >= 0 and member.left_s > 0:
            member.left_s -= self._piece(member)
            if member.left_s > 1e-9:
                self._ask(number, lambda: self._arbiter.yield_point(member.name, member.stage))
                return
            self._arbiter.release(member.name, member.stage)
        following = [r for r in range(member.stage + 1, STAGE_COUNT) if member.iteration.stage_s[r] > 0]
        if following:
            stage, varied = following[0], 1 + self._draw.uniform(-_VARIATION, _VARIATION)
            member.stage_s[stage] = member.iteration.stage_s[stage] * varied
            member.stage, member.left_s = stage, member.stage_s[stage]
            self._ask(number, lambda: self._arbiter.acquire(member.name, member.stage))
        elif member.stage < STAGE_COUNT:
            member.stage, member.left_s = STAGE_COUNT, 0.0
            self._later(number, member.iteration.rest_s + self._sharing.overhead_s)
        else:
            self._end_iteration(number)

    def _ask(self, number: int, ask: Callable[[], object]) -> None:
        member = self.members[number]
        member.asked_s = self._time.now_s
        try:
            ask()
        except _Suspended as suspended:
            member.waiter = suspended.waiter
        else:
            self._later(number, self._piece(member))

    def _end_iteration(self, number: int) -> None:
        member, now_s = self.members[number], self._time.now_s
        record = IterationRecord(now_s - member.begun_s, tuple(member.stage_s), tuple(member.wait_s))
        self._arbiter.iteration_done(member.name, record)
        member.iterations += 1
        if member.iterations == _WARM_UP:
            member.first_s = now_s
        elif member.iterations > _WARM_UP:
            member.worked_s += sum(member.stage_s) + member.iteration.rest_s
        member.last_s, member.begun_s = now_s, now_s
        member.wait_s = [0.0] * STAGE_COUNT
        member.stage = -1
        self._later(number, 0.0)


def _driven(
    arbiter_of: Callable[[_Time], Arbiter], iterations: Sequence[Iteration], sharing: Sharing
) -> tuple[float, ...]:
    time = _Time()
    drive = _Drive(arbiter_of(time), time, iterations, sharing)
    drive.run()
    return tuple(member.speed for member in drive.members)


def _plain(iterations: Sequence[Iteration], sharing: Sharing) -> tuple[float, ...]:
    """Speeds without turns: users of a resource share its time equally, piece by piece."""
    if not sharing.contention:
        return tuple(iteration.iteration_s / (iteration.iteration_s + sharing.overhead_s) for iteration in iterations)
    left = [[*iteration.stage_s, iteration.rest_s + sharing.overhead_s] for iteration in iterations]
    tokens = [sharing.cpus if resource == PREPROCESS else 1 for resource in range(STAGE_COUNT)] + [len(iterations)]
    work, everybody = [list(each) for each in left], range(len(iterations))
    stage, done = [0] * len(iterations), [0] * len(iterations)
    first_s, last_s, now_s = [0.0] * len(iterations), [0.0] * len(iterations), 0.0
    for _ in range(_MOST_STEPS):
        if min(done) >= _ITERATIONS + _WARM_UP:
            break
        users = [max(1.0, sum(stage[other] == stage[each] for other in everybody) / tokens[stage[each]])
                 for each in everybody]  # fmt: skip
        step_s = min(left[each][stage[each]] * users[each] for each in everybody)
        now_s += step_s
        for each in everybody:
            left[each][stage[each]] -= step_s / users[each]
            while left[each][stage[each]] <= 1e-9:
                stage[each] += 1
                if stage[each] > STAGE_COUNT:
                    stage[each], left[each] = 0, list(work[each])
                    done[each] += 1
                    first_s[each] = now_s if done[each] == _WARM_UP else first_s[each]
                    last_s[each] = now_s
                    break
    return tuple(
        (count - _WARM_UP) / (last - first) * iteration.iteration_s if count > _WARM_UP and last > first else 0.0
        for count, first, last, iteration in zip(done, first_s, last_s, iterations, strict=True)
    )


@lru_cache(maxsize=100_000)
def _speeds(iterations: tuple[Iteration, ...], sharing: Sharing) -> tuple[float, ...]:
    if sharing.discipline == "plain":
        return _plain(iterations, sharing)
    if sharing.discipline == "lockstep" and len(iterations) <= STAGE_COUNT:
        ordering: list[str | None] = [str(number) for number in range(1, len(iterations) + 1)]
        return _driven(lambda time: _SteppedLockstep(ordering, time), iterations, sharing)
    if sharing.discipline == "auto":
        return _best(iterations, sharing)
    return _driven(lambda time: _SteppedFair(time, cpus=sharing.cpus), iterations, sharing)


def _best(iterations: tuple[Iteration, ...], sharing: Sharing) -> tuple[float, ...]:
    """What `auto` settles on: the discipline that it begins with, unless another one is clearly better."""
    names = candidates(len(iterations), Node(has_gpu=sharing.has_gpu))
    found = [_speeds(iterations, replace(sharing, discipline=name)) for name in names]
    kept = found[0]
    for other in found[1:]:
        if sum(other) > sum(kept) * (1 + LEAST_GAIN):
            kept = other
    return kept


def speeds(members: Mapping[int, Iteration], sharing: Sharing) -> dict[int, float]:
    """Return each member's normalized speed beside the others, 1 = as fast as alone."""
    # Equal sets have equal speeds in any order.
    order = sorted(members, key=lambda job_id: (members[job_id].stage_s, members[job_id].iteration_s, job_id))
    iterations = tuple(members[job_id] for job_id in order)
    return dict(zip(order, _speeds(iterations, sharing), strict=True))
