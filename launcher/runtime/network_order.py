"""One order of the network for all ranks of a group: two members' collectives never cross.

A group of DDP jobs has one runtime per rank. If rank 0 gave the network to member A first and rank 1 to member B,
A's all-reduce on rank 0 would wait for A on rank 1, which waits for B, which waits for B on rank 0, which waits
for A: forever. So rank 0 alone decides. Whenever its own arbiter grants the network, it tells the other ranks whom
(`grant`), and they grant theirs in just that sequence.

Why nothing waits forever:

1. No member holds a resource while it waits for another: a stage inside another suspends the outer one, which frees its
   resource, before it asks for its own (`StageClock.enter`). A holder of the network therefore needs no other
   resource to finish its collective but the arrival of its peers.
2. Take the oldest grant that has not come to its end on every rank, of member A. On no rank is the network held by
   an older one, so each rank on which A asks grants it to A. On the others A is on its way there: it may wait
   for a resource that another member holds, but that member, by 1, does not wait for anything while it holds it
   (it neither waits for the network, nor, as collectives run in `synchronize` stages, for a peer).
   So A arrives everywhere, its collective ends, and the next grant is the oldest.
3. A grant is only made once every rank has reported that this session of the member runs there (`joined`), so the
   sequence never names one that does not come. Where the session has ended, its grants are skipped.
4. When a session fails on one rank, the other ranks are told (`failed`); theirs is ended after a grace if the script's
   own communication did not notice. When a rank is lost, the order is lost: all other runtimes end, and the
   scheduler puts the members back into the queue.

What must hold: a script asks for the network equally often, in the same sequence, on all its ranks, as it must
for its collectives anyway; and its collectives run inside `synchronize` stages. A collective inside another stage
holds that stage's resource while it waits for its peers, which 2 excludes.
"""

import mmap
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from typing import Final

from muri.clock import MACHINE_CLOCK
from muri.launcher.arbitration.arbiter import Arbiter, Waiter, WaitInterruptedError
from muri.launcher.arbitration.disciplines import FairArbiter
from muri.launcher.job.stage_clock import IterationRecord
from muri.profiler.records import STAGES

NETWORK: Final = STAGES.index("synchronize")


def session_key(environment: Mapping[str, str]) -> str:
    """The key that all ranks of one run of a script share: the job's restart and its step."""
    names = ("SLURM_RESTART_COUNT", "SLURM_STEP_ID", "TORCHELASTIC_RESTART_COUNT")
    return ".".join(environment.get(name) or "0" for name in names)


class Leader:
    """Rank 0: its arbiter decides, and the other ranks are told.

    Args:
        publish: Tells the other ranks of a grant: the member and its session's key.
        others: The other ranks' numbers.
    """

    def __init__(self, publish: Callable[[str, str], None], others: frozenset[int]) -> None:
        self.arbiter = FairArbiter(keeps_free=False)
        self._publish = publish
        self._others = others
        self._lock = threading.Lock()
        self._keys: dict[str, str] = {}
        self._there: dict[tuple[str, str], set[int]] = {}
        self._waiting: dict[str, list[Waiter]] = {}

    def begin(self, member: str, key: str) -> None:
        """Note the session of this rank."""
        with self._lock:
            self._keys[member] = key
            self._there.setdefault((member, key), set())

    def joined(self, rank: int, member: str, key: str) -> None:
        """Note that the session runs on another rank, too."""
        with self._lock:
            self._there.setdefault((member, key), set()).add(rank)
            if self._complete(member):
                self._wake(member, granted=True)

    def end(self, member: str) -> None:
        """Forget the session."""
        with self._lock:
            key = self._keys.pop(member, "")
            self._there.pop((member, key), None)
            self._wake(member, granted=False)

    def before(self, member: str) -> None:
        """Wait until the session runs on all ranks.

        Raises:
            WaitInterruptedError: The member was cancelled or is not there.
        """
        with self._lock:
            if member not in self._keys:
                raise WaitInterruptedError(member)
            if self._complete(member):
                return
            waiter = Waiter(member, NETWORK, MACHINE_CLOCK)
            self._waiting.setdefault(member, []).append(waiter)
        waiter.sleep()
        if waiter.interrupted:
            raise WaitInterruptedError(member)

    def after(self, member: str) -> None:
        """Tell the others while the member holds the network, so that messages keep the order of grants."""
        with self._lock:
            key = self._keys.get(member)
        if key is not None:
            self._publish(member, key)

    def interrupt(self, member: str) -> None:
        """End the wait for the peers."""
        with self._lock:
            self._wake(member, granted=False)

    def _complete(self, member: str) -> bool:
        return member in self._keys and self._there[member, self._keys[member]] >= self._others

    def _wake(self, member: str, *, granted: bool) -> None:
        for waiter in self._waiting.pop(member, []):
            waiter.wake(granted=granted)


class Follower:
    """Any other rank: the network is granted in rank 0's sequence."""

    def __init__(self) -> None:
        self.arbiter = FairArbiter(orders={NETWORK: self._next}, keeps_free=False)
        self._lock = threading.Lock()
        self._sequence: deque[tuple[str, str]] = deque()
        self._keys: dict[str, str] = {}
        self._ended: set[tuple[str, str]] = set()

    def begin(self, member: str, key: str) -> None:
        """Note the session of this rank."""
        with self._lock:
            self._keys[member] = key
            self._ended.discard((member, key))

    def granted(self, member: str, key: str) -> None:
        """Rank 0 gave its network to a member."""
        with self._lock:
            self._sequence.append((member, key))
        self.arbiter.dispatch(NETWORK)

    def end(self, member: str) -> None:
        """Skip the turns of the session."""
        with self._lock:
            key = self._keys.pop(member, None)
            if key is not None:
                self._ended.add((member, key))
        self.arbiter.dispatch(NETWORK)

    def before(self, member: str) -> None:
        """Do nothing: the sequence names only members with all their peers present."""

    def after(self, member: str) -> None:
        """No rank follows this one."""

    def interrupt(self, member: str) -> None:
        """The arbiter ends all waits of this rank."""

    def _next(self, waiting: list[str]) -> str | None:
        """The next member in rank 0's sequence; None while it does not wait here, or none is next."""
        with self._lock:
            while self._sequence and self._sequence[0] in self._ended:
                self._sequence.popleft()
            if not self._sequence:
                return None
            member, key = self._sequence[0]
            if member not in waiting or self._keys.get(member) != key:
                return None
            self._sequence.popleft()
            return member


class RankedArbiter(Arbiter):
    """The arbiter of one rank: the network in the order of all ranks, the rest as the rank itself decides.

    Args:
        role: This rank's part in the order.
        on_join: Called when a session has started, with the member and its session's key.
    """

    def __init__(self, role: Leader | Follower, on_join: Callable[[str, str], None]) -> None:
        self._arbiter = role.arbiter
        super().__init__()
        self._role = role
        self._on_join = on_join
        self._announced: dict[str, str] = {}
        self._begun: Counter[str] = Counter()
        self._keys: dict[str, str] = {}

    @property
    def waiting_hint(self) -> MutableSequence[int] | mmap.mmap:
        """The rank's own arbiter knows who waits."""
        return self._arbiter.waiting_hint

    @waiting_hint.setter
    def waiting_hint(self, hint: MutableSequence[int] | mmap.mmap) -> None:
        self._arbiter.waiting_hint = hint

    def announce(self, member: str, key: str) -> None:
        """Name the run of the script that the member is about to start."""
        self._announced[member] = key

    def key_of(self, member: str) -> str:
        """What the member's last session is called on all ranks."""
        return self._keys.get(member, "")

    def join(self, member: str, solo_iteration_s: float | None = None, min_speed: float = 0.0) -> None:
        """Start the announced session; one step may start several, one after the other."""
        run = f"{member}/{self._announced.get(member, '')}"
        self._begun[run] += 1
        key = self._keys[member] = f"{self._announced.get(member, '')}#{self._begun[run]}"
        self._arbiter.join(member, solo_iteration_s, min_speed)
        self._role.begin(member, key)
        self._on_join(member, key)

    def leave(self, member: str) -> None:
        """Free what the member holds."""
        self._arbiter.leave(member)
        self._role.end(member)

    def acquire(self, member: str, resource: int) -> float:
        """Wait for the resource."""
        if resource != NETWORK:
            return self._arbiter.acquire(member, resource)
        start_s = self._now()
        self._role.before(member)
        self._arbiter.acquire(member, resource)
        self._role.after(member)
        return self._now() - start_s

    def release(self, member: str, resource: int) -> bool:
        """Pass the resource on."""
        return self._arbiter.release(member, resource)

    def interrupt(self, member: str) -> None:
        """End the member's wait."""
        self._role.interrupt(member)
        self._arbiter.interrupt(member)

    def yield_point(self, member: str, resource: int) -> float:
        """Let others go first, but never within a collective: peers on other ranks are in it as well."""
        return 0.0 if resource == NETWORK else self._arbiter.yield_point(member, resource)

    def holders(self) -> Sequence[str | None]:
        """Who holds each of the rank's resources."""
        return self._arbiter.holders()

    def obstructs(self, member: str) -> bool:
        """Whether others on this rank wait for what the member holds here."""
        return self._arbiter.obstructs(member)

    def iteration_done(self, member: str, record: IterationRecord) -> None:
        """Tell the rank's arbiter."""
        self._arbiter.iteration_done(member, record)
