"""One order of the network for all ranks of a group: two members' collectives never cross.

A group of DDP jobs has one runtime per rank. If rank 0 gave the network to member A first and rank 1 to member B, A's
all-reduce on rank 0 would wait for A on rank 1, which waits for B, which waits for B on rank 0, which waits for A:
forever. So rank 0 alone decides. Whenever its own arbiter grants the network, it tells the other ranks the member
(`grant`), and they grant theirs in just that sequence.

Why no member waits forever:

1. No member holds a resource while it waits for another: a stage inside another suspends the outer one, which frees its
   resource, before it asks for its own (`StageClock.enter`). A holder of the network therefore needs no other
   resource to finish its collective but the arrival of its peers.
2. Take the oldest grant that has not come to its end on every rank, of member A. On no rank is the network held by
   an older one, so each rank on which A asks grants it to A. On the others A is on its way there: it may wait
   for a resource that another member holds, but that member, by 1, does not wait while it holds it
   (neither for the network, nor, as collectives run in `synchronize` stages, for a peer).
   So A arrives everywhere, its collective ends, and the next grant is the oldest.
3. A grant is only made once every rank has reported that this session of the member runs there (`joined`). Where the
   session has ended, its grants are skipped.
4. A suspended member's processes are stopped wherever they are, and their tokens go to others on each rank. A grant
   that comes meanwhile is owed there: once it goes on, the member has the network for that collective at once, beside
   the holder's, because its peers may be in it already.
5. When a session fails on one rank, the other ranks are told (`failed`); theirs is ended after a grace if the script's
   own communication did not notice. When a rank is lost, the order is lost: all other runtimes end, and the
   scheduler puts the members back into the queue.

A script must ask for the network equally often, in the same sequence, on all its ranks, as it must for its collectives
anyway; and its collectives must run inside `synchronize` stages. A collective inside another stage holds that stage's
resource while it waits for its peers, which 2 excludes.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping

from muri.clock import MACHINE_CLOCK
from muri.launcher.arbitration.arbiter import Waiter, WaitInterruptedError, WrappingArbiter
from muri.launcher.arbitration.disciplines import FairArbiter
from muri.launcher.job.stage_clock import SYNCHRONIZE as NETWORK


def session_key(environment: Mapping[str, str]) -> str:
    """Return the key that all ranks of one run of a script share: the job's restart and its step."""
    names = ("SLURM_RESTART_COUNT", "SLURM_STEP_ID", "TORCHELASTIC_RESTART_COUNT")
    return ".".join(environment.get(name) or "0" for name in names)


class RankedArbiter(WrappingArbiter):
    """The arbiter of one rank: the network in the order of all ranks, the rest as the rank itself decides."""

    def __init__(self, inner: FairArbiter) -> None:
        super().__init__(inner)
        self._announced: dict[str, str] = {}
        self._begun: Counter[str] = Counter()
        self._keys: dict[str, str] = {}
        self._present: dict[str, str] = {}

    def announce(self, member: str, key: str) -> None:
        """Name the run of the script that the member is about to start."""
        self._announced[member] = key

    def key_of(self, member: str) -> str:
        """Return the name of the member's last session, which is the same on all ranks."""
        return self._keys.get(member, "")

    def join(self, member: str, solo_iteration_s: float | None = None, min_speed: float = 0.0) -> None:
        """Start the announced session; one step may start several, one after the other."""
        run = f"{member}/{self._announced.get(member, '')}"
        self._begun[run] += 1
        key = self._keys[member] = f"{self._announced.get(member, '')}#{self._begun[run]}"
        self._inner.join(member, solo_iteration_s, min_speed)
        self._begin(member, key)

    def leave(self, member: str) -> None:
        """End the session and free its tokens."""
        self._inner.leave(member)
        self._end(member)

    def stand_still(self, member: str) -> None:
        """Take its tokens back; the session goes on under the same key, as it does on the other ranks."""
        self._inner.stand_still(member)

    def go_on(self, member: str, solo_iteration_s: float | None = None, min_speed: float = 0.0) -> None:
        """Grant it resources again."""
        self._inner.go_on(member, solo_iteration_s, min_speed)

    def interrupt(self, member: str) -> None:
        """End the member's wait."""
        self._inner.interrupt(member)

    def yield_point(self, member: str, resource: int) -> float:
        """Let others go first, but never within a collective: peers on other ranks are in it as well."""
        return 0.0 if resource == NETWORK else self._inner.yield_point(member, resource)

    def _begin(self, member: str, key: str) -> None:
        raise NotImplementedError

    def _end(self, member: str) -> None:
        raise NotImplementedError


class Leader(RankedArbiter):
    """Rank 0, whose order the other ranks follow: `publish` tells them of a grant's member and session key."""

    def __init__(self, publish: Callable[[str, str], None], others: frozenset[int]) -> None:
        super().__init__(FairArbiter(several_ranks=True))
        self._publish = publish
        self._others = others
        self._there: dict[tuple[str, str], set[int]] = {}
        self._waiting: dict[str, list[Waiter]] = {}

    def joined(self, rank: int, member: str, key: str) -> None:
        """Note that the session runs on another rank, too."""
        with self._mutex:
            self._there.setdefault((member, key), set()).add(rank)
            if self._complete(member):
                self._wake(member, granted=True)

    def acquire(self, member: str, resource: int) -> float:
        """Wait for the resource; for the network until the session runs on all ranks, and tell them of the grant."""
        if resource != NETWORK:
            return self._inner.acquire(member, resource)
        start_s = self._now()
        self._await_peers(member)
        self._inner.acquire(member, resource)
        with self._mutex:
            key = self._present.get(member)
        if key is not None:  # told while the member holds the network, so that messages keep the order of grants
            self._publish(member, key)
        return self._now() - start_s

    def interrupt(self, member: str) -> None:
        """End the member's wait, also for its peers."""
        with self._mutex:
            self._wake(member, granted=False)
        self._inner.interrupt(member)

    def _begin(self, member: str, key: str) -> None:
        with self._mutex:
            self._present[member] = key
            self._there.setdefault((member, key), set())

    def _end(self, member: str) -> None:
        with self._mutex:
            self._there.pop((member, self._present.pop(member, "")), None)
            self._wake(member, granted=False)

    def _await_peers(self, member: str) -> None:
        with self._mutex:
            if member not in self._present:
                raise WaitInterruptedError(member)
            if self._complete(member):
                return
            waiter = Waiter(member, NETWORK, MACHINE_CLOCK)
            self._waiting.setdefault(member, []).append(waiter)
        waiter.sleep()
        if not waiter.granted:
            raise WaitInterruptedError(member)

    def _complete(self, member: str) -> bool:
        return member in self._present and self._there[member, self._present[member]] >= self._others

    def _wake(self, member: str, *, granted: bool) -> None:
        for waiter in self._waiting.pop(member, []):
            waiter.wake(granted=granted)


class Follower(RankedArbiter):
    """Any other rank: the network is granted in rank 0's sequence; `on_join` is called when a session has started."""

    def __init__(self, on_join: Callable[[str, str], None]) -> None:
        self._fair = FairArbiter(orders={NETWORK: self._next}, several_ranks=True)
        super().__init__(self._fair)
        self._on_join = on_join
        self._sequence: deque[tuple[str, str]] = deque()
        self._ended: set[tuple[str, str]] = set()
        self._still: set[str] = set()
        self._owed: Counter[str] = Counter()

    def granted(self, member: str, key: str) -> None:
        """Note that rank 0 gave its network to a member."""
        with self._mutex:
            self._sequence.append((member, key))
        self._fair.dispatch(NETWORK)

    def stand_still(self, member: str) -> None:
        """Take its tokens back; others do not wait for it to take its turn at the network."""
        with self._mutex:
            self._still.add(member)
        super().stand_still(member)  # and dispatch the network anew

    def go_on(self, member: str, solo_iteration_s: float | None = None, min_speed: float = 0.0) -> None:
        """Grant it resources again."""
        with self._mutex:
            self._still.discard(member)
        super().go_on(member, solo_iteration_s, min_speed)

    def acquire(self, member: str, resource: int) -> float:
        """Wait for the resource; have the network at once where the turn has come while the member stood still."""
        if resource == NETWORK:
            with self._mutex:
                if self._owed[member]:
                    self._owed[member] -= 1
                    return 0.0
        return self._inner.acquire(member, resource)

    def _begin(self, member: str, key: str) -> None:
        with self._mutex:
            self._present[member] = key
            self._ended.discard((member, key))
        self._on_join(member, key)

    def _end(self, member: str) -> None:
        with self._mutex:
            key = self._present.pop(member, None)
            if key is not None:
                self._ended.add((member, key))
            self._still.discard(member)
            self._owed.pop(member, None)
        self._fair.dispatch(NETWORK)

    def _next(self, waiting: list[str]) -> str | None:
        """Return the next member in rank 0's sequence; None while it does not wait here, or there is none."""
        with self._mutex:
            while self._sequence and (self._sequence[0] in self._ended or self._sequence[0][0] in self._still):
                member, key = self._sequence.popleft()
                self._owed[member] += self._present.get(member) == key
            if not self._sequence:
                return None
            member, key = self._sequence[0]
            if member not in waiting or self._present.get(member) != key:
                return None
            self._sequence.popleft()
            return member
