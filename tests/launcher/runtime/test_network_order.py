"""The order of the network over several ranks: the connections, and what each rank grants."""

import contextlib
import os
import random
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from polling import DEADLINE_S, until
from ranks_harness import free_port
from virtual_clock import VirtualClock

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import UsageError
from muri.group_spec import GroupSpec, MemberSpec
from muri.launcher.arbitration.arbiter import PausingArbiter, WaitInterruptedError
from muri.launcher.job.environment import missing_variables, task_of
from muri.launcher.job.stage_clock import SYNCHRONIZE as NETWORK
from muri.launcher.job.stage_clock import TURNS, TURNS_INDEX
from muri.launcher.runtime.link import RETRY_S, Listener, Place, RankLink, RankLinkError, connect
from muri.launcher.runtime.main import KEY_VARIABLE, PORT_VARIABLE, parse_place
from muri.launcher.runtime.member_table import MemberTable
from muri.launcher.runtime.network_order import Follower, Leader, RankedArbiter, session_key
from muri.launcher.runtime.ranks import BY_SIGNAL, Ranks
from muri.launcher.runtime.server import Server
from muri.launcher.sessions.setup import MemberSession

KEY = b"k" * 64


def sever(link: RankLink) -> None:
    """End a connection, so that threads that receive see it; closing it alone would wake none."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(link._connection.fileno())) as raw:
        raw.shutdown(socket.SHUT_RDWR)


class Noting(Ranks):
    """Notes failures on other ranks, and its end, instead of acting on them."""

    def __init__(self, place: Place, clock: Clock = MACHINE_CLOCK) -> None:
        self.failures: list[tuple[int, str, int, int]] = []
        self.ends: list[None] = []
        super().__init__(place, MemberTable(GroupSpec((MemberSpec("1"),))), lambda: self.ends.append(None), clock)

    def _rank_failed(self, member: str, key: str, rank: int, code: int) -> None:
        if rank != self.place.rank:
            self.failures.append((self.place.rank, member, rank, code))

    def fails(self, member: str, code: int | None, *, lost: bool = False) -> None:
        """End a member's session with an exit code."""
        session = cast(MemberSession, SimpleNamespace(member=member, exit_code=code, lost=lost))
        self.ended(session, self.arbiter.key_of(member))


class Group:
    """The ranks of a group, all in this process."""

    def __init__(self, world_size: int) -> None:
        port = free_port()
        self.ranks = [Noting(Place(rank, world_size, "127.0.0.1", port, KEY)) for rank in range(world_size)]
        for ranks in self.ranks:
            ranks.start()
        until(lambda: all(len(ranks._links) >= 1 for ranks in self.ranks), "the connections")
        until(lambda: len(self.ranks[0]._links) == world_size - 1, "all ranks")

    @property
    def failures(self) -> list[tuple[int, str, int, int]]:
        """On each rank: the member that failed on another one, that rank and the exit code."""
        return [failure for ranks in self.ranks for failure in ranks.failures]

    def lost(self) -> set[int]:
        """The ranks that have lost another one."""
        return {ranks.place.rank for ranks in self.ranks if ranks.lost}

    def join(self, member: str, *, but: int | None = None) -> None:
        """Start a session of the member on all ranks but one."""
        for ranks in self.ranks:
            if ranks.place.rank != but:
                ranks.arbiter.announce(member, "0.0.0")
                ranks.arbiter.join(member)

    def close(self) -> None:
        """End as the host does."""
        self.ranks[0].end()
        for ranks in self.ranks:
            for link in list(ranks._links):
                sever(link)


@pytest.fixture
def group() -> Iterator[Group]:
    """Three ranks."""
    group = Group(3)
    yield group
    group.close()


class Asking(Future[Any]):
    """The outcome of a call in a thread of its own, such as a member's request for the network."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        super().__init__()
        threading.Thread(target=self._work, args=(call, *arguments), daemon=True).start()

    def _work(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            self.set_result(call(*arguments))
        except BaseException as error:  # looked at by the test
            self.set_exception(error)

    def waits(self, arbiter: RankedArbiter) -> bool:
        """Whether it has to wait: on rank 0 for its peers, on the others for its turn."""
        waiting = arbiter._waiting if isinstance(arbiter, Leader) else arbiter.waiting_hint
        until(lambda: self.done() or any(waiting), "the answer or the wait for it")
        return not self.done()


def test_followers_grant_in_the_leaders_order(group: Group) -> None:
    group.join("1")
    group.join("2")
    leader, follower = group.ranks[0].arbiter, group.ranks[1].arbiter
    second = Asking(follower.acquire, "2", NETWORK)
    assert second.waits(follower)
    leader.acquire("1", NETWORK)
    follower.acquire("1", NETWORK)
    assert not second.done(), "2 must wait for 1, which is first on rank 0"
    follower.release("1", NETWORK)
    assert follower.holders()[NETWORK] is None, "rank 0 has not granted the network to 2 yet"
    leader.release("1", NETWORK)
    leader.acquire("2", NETWORK)
    assert isinstance(second.result(DEADLINE_S), float)
    assert follower.holders()[NETWORK] == "2"


def test_a_sole_member_asks_on_every_rank(group: Group) -> None:
    group.join("1")
    assert [ranks.arbiter.waiting_hint[TURNS_INDEX] for ranks in group.ranks] == [TURNS] * 3


def test_the_leader_waits_until_a_session_runs_everywhere(group: Group) -> None:
    leader = group.ranks[0].arbiter
    group.join("1", but=2)
    first = Asking(leader.acquire, "1", NETWORK)
    assert first.waits(leader)
    group.join("2")
    leader.acquire("2", NETWORK)
    assert leader.holders()[NETWORK] == "2"
    leader.release("2", NETWORK)
    assert not first.done()
    group.ranks[2].arbiter.announce("1", "0.0.0")
    group.ranks[2].arbiter.join("1")
    assert isinstance(first.result(DEADLINE_S), float)


def test_turns_of_a_session_that_ended_are_skipped(group: Group) -> None:
    group.join("1")
    group.join("2")
    leader, follower = group.ranks[0].arbiter, group.ranks[1].arbiter
    leader.acquire("1", NETWORK)
    leader.release("1", NETWORK)
    leader.acquire("2", NETWORK)
    second = Asking(follower.acquire, "2", NETWORK)
    assert second.waits(follower)
    follower.leave("1")
    assert isinstance(second.result(DEADLINE_S), float)


def test_a_grant_to_an_earlier_run_of_a_script_is_none_to_the_next(group: Group) -> None:
    group.join("1")
    leader, follower = group.ranks[0].arbiter, group.ranks[1].arbiter
    leader.acquire("1", NETWORK)
    leader.release("1", NETWORK)
    assert isinstance(follower, Follower)
    until(lambda: follower._sequence, "the grant")
    for ranks in group.ranks:
        ranks.arbiter.leave("1")
    group.join("1", but=0)
    next_run = Asking(follower.acquire, "1", NETWORK)
    assert next_run.waits(follower)
    follower.interrupt("1")
    assert isinstance(next_run.exception(DEADLINE_S), WaitInterruptedError)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wait_can_be_interrupted(group: Group, rank: int) -> None:
    group.join("1", but=2)
    arbiter = group.ranks[rank].arbiter
    waiting = Asking(arbiter.acquire, "1", NETWORK)
    assert waiting.waits(arbiter)
    arbiter.interrupt("1")
    assert isinstance(waiting.exception(DEADLINE_S), WaitInterruptedError)


def test_a_failure_is_told_to_all_other_ranks(group: Group) -> None:
    group.join("1")
    group.ranks[1].fails("1", 3)
    until(lambda: len(group.failures) == 2, "the others to be told")
    assert sorted(group.failures) == [(0, "1", 1, 3), (2, "1", 1, 3)]
    group.ranks[2].fails("1", 0)
    group.ranks[0].fails("1", 1)
    until(lambda: len(group.failures) == 4, "the leader's failure")
    assert sorted(group.failures) == [(0, "1", 1, 3), (1, "1", 0, 1), (2, "1", 0, 1), (2, "1", 1, 3)]


def test_a_lost_connection_is_the_end_on_both_sides(group: Group) -> None:
    sever(group.ranks[2]._links[0])
    until(lambda: group.lost() >= {0, 2}, "the loss to be seen")


def test_an_orderly_end_is_no_loss(group: Group) -> None:
    group.ranks[0].end()
    until(lambda: [len(ranks.ends) for ranks in group.ranks] == [0, 1, 1], "the others to be told")
    for ranks in group.ranks:
        for link in ranks._links:
            sever(link)
    assert group.lost() == set()


def test_random_requests_come_to_an_end_in_one_order(group: Group) -> None:
    members, rounds = ("1", "2", "3"), 60
    for member in members:
        group.join(member)
    orders: list[list[str]] = [[] for _ in group.ranks]
    barriers = {member: threading.Barrier(len(group.ranks), timeout=DEADLINE_S) for member in members}

    def train(rank: int, member: str) -> None:
        arbiter, delays = group.ranks[rank].arbiter, random.Random(f"{rank}{member}")
        for _ in range(rounds):
            for resource in (1, 2):
                arbiter.acquire(member, resource)
                threading.Event().wait(delays.uniform(0, 0.0005))
                arbiter.release(member, resource)
            arbiter.acquire(member, NETWORK)
            orders[rank].append(member)
            barriers[member].wait()  # a collective: no rank leaves before all have come
            arbiter.release(member, NETWORK)

    running = [Asking(train, rank, member) for rank in range(len(group.ranks)) for member in members]
    assert [each.result(DEADLINE_S) for each in running] == [None] * len(running)
    assert orders[1] == orders[0]
    assert orders[2] == orders[0]
    assert len(orders[0]) == rounds * len(members)


def test_who_stands_still_keeps_the_network_from_no_other_and_has_its_turn_later(group: Group) -> None:
    group.join("1")
    group.join("2")
    leader, follower, third = (ranks.arbiter for ranks in group.ranks)
    leader.acquire("1", NETWORK)  # it is in a collective, to which its peer on rank 1 has yet to come
    third.acquire("1", NETWORK)
    second = Asking(follower.acquire, "2", NETWORK)
    assert isinstance(follower, Follower)
    until(lambda: follower._sequence, "the grant")
    assert second.waits(follower)
    for arbiter in (leader, follower, third):
        arbiter.stand_still("1")
    leader.acquire("2", NETWORK)
    third.acquire("2", NETWORK)
    assert isinstance(second.result(DEADLINE_S), float)
    with pytest.raises(WaitInterruptedError):
        leader.acquire("1", NETWORK)
    for arbiter in (leader, follower, third):
        arbiter.go_on("1")
    follower.acquire("1", NETWORK)  # beside 2: its peers are in the collective already
    assert follower.holders()[NETWORK] == "2"
    follower.release("1", NETWORK)
    assert follower.holders()[NETWORK] == "2"
    again = Asking(follower.acquire, "1", NETWORK)
    assert again.waits(follower)
    leader.release("2", NETWORK)
    leader.acquire("1", NETWORK)
    follower.release("2", NETWORK)
    assert isinstance(again.result(DEADLINE_S), float)


def test_the_next_run_of_a_member_that_ended_standing_still_is_owed_nothing(group: Group) -> None:
    group.join("1")
    group.join("2")
    leader, follower = group.ranks[0].arbiter, group.ranks[1].arbiter
    assert isinstance(follower, Follower)
    leader.acquire("1", NETWORK)
    until(lambda: follower._sequence, "the grant")
    other = Asking(follower.acquire, "2", NETWORK)
    assert other.waits(follower)
    follower.stand_still("1")
    assert not follower._sequence
    for ranks in group.ranks:
        ranks.arbiter.leave("1")
    group.join("1", but=0)
    next_run = Asking(follower.acquire, "1", NETWORK)
    until(lambda: next_run.done() or len(follower._fair._waiting[NETWORK]) == 2, "the answer or the wait for it")
    assert not next_run.done()
    for member, asking in (("1", next_run), ("2", other)):
        follower.interrupt(member)
        assert isinstance(asking.exception(DEADLINE_S), WaitInterruptedError)


def test_random_pauses_at_random_places_on_each_rank_keep_no_collective_from_its_end(group: Group) -> None:
    members, rounds = ("1", "2", "3"), 40
    arbiters = [PausingArbiter(ranks.arbiter) for ranks in group.ranks]
    for ranks, arbiter in zip(group.ranks, arbiters, strict=True):
        for member in members:
            ranks.arbiter.announce(member, "0.0.0")
            arbiter.join(member)
    barriers = {member: threading.Barrier(len(arbiters), timeout=DEADLINE_S) for member in members}
    over = threading.Event()

    def train(rank: int, member: str) -> None:
        delays = random.Random(f"{rank}{member}")
        for _ in range(rounds):
            for resource in (1, 2):
                arbiters[rank].acquire(member, resource)
                over.wait(delays.uniform(0, 0.0005))
                arbiters[rank].release(member, resource)
            arbiters[rank].acquire(member, NETWORK)
            barriers[member].wait()
            arbiters[rank].release(member, NETWORK)

    def suspend(rank: int, member: str) -> None:
        delays = random.Random(f"suspend {rank}{member}")
        while not over.wait(delays.uniform(0, 0.01)):
            arbiters[rank].pause(member)
            over.wait(delays.uniform(0, 0.005))
            arbiters[rank].resume(member)

    places = [(rank, member) for rank in range(len(arbiters)) for member in members]
    pauses = [Asking(suspend, *place) for place in places if place[1] != "3"]
    running = [Asking(train, *place) for place in places]
    assert [each.result(DEADLINE_S) for each in running] == [None] * len(running)
    over.set()
    assert [each.result(DEADLINE_S) for each in pauses] == [None] * len(pauses)


@pytest.mark.parametrize(("code", "lost", "told"), [(None, False, BY_SIGNAL), (None, True, 0), (7, False, 7)])
def test_only_a_script_that_a_signal_ended_fails_without_an_exit_code(
    group: Group, code: int | None, lost: bool, told: int
) -> None:
    group.join("1")
    group.ranks[1].fails("1", code, lost=lost)
    group.ranks[1].fails("1", 9)
    until(lambda: {failure[-1] for failure in group.failures} >= {9}, "the others to be told")
    assert {failure[-1] for failure in group.failures} - {9} == {told} - {0}


def test_an_end_is_told_under_the_sessions_own_key_even_if_the_next_one_begins_at_once(tmp_path: Path) -> None:
    ranks, table, session = Mock(place=Mock(rank=1)), Mock(), Mock(member="1")
    ranks.arbiter.key_of.return_value = "this"

    def begin_the_next(_session: object) -> None:
        ranks.arbiter.key_of.return_value = "next"

    table.finish.side_effect = begin_the_next
    server = Server(tmp_path, table, Mock(), Mock(pilot_job="7"), ranks)
    server._note_end(session)
    server.close()
    ranks.ended.assert_called_once_with(session, "this")


@pytest.fixture
def listener() -> Iterator[tuple[Place, list[RankLink], Listener]]:
    """Rank 0 of a group of two."""
    links: list[RankLink] = []
    place = Place(0, 2, "127.0.0.1", free_port(), KEY)
    listener = Listener(place, links.append)
    yield place, links, listener
    listener.close()


def peer(place: Place, rank: int = 1, key: bytes = KEY) -> Place:
    """Another rank of the group."""
    return Place(rank, place.world_size, place.host, place.port, key)


def test_who_does_not_know_the_key_is_refused(listener) -> None:
    place, links, _ = listener
    with pytest.raises(RankLinkError, match="could not reach rank 0"):
        connect(peer(place, key=b"w" * 64), 0.2)
    assert links == []
    sever(connect(peer(place), DEADLINE_S))
    until(lambda: len(links) == 1, "the rank with the key")


def send_slowly(strangers: list[socket.socket], over: threading.Event, rounds: int) -> int:
    """Send a byte over each connection every while; return how often."""
    for done in range(rounds):
        if over.wait(0.1):
            return done
        for raw in strangers:
            with contextlib.suppress(OSError):
                raw.send(b"x")
    return rounds


def test_garbage_silence_and_slowness_do_not_keep_a_rank_out(listener, monkeypatch: pytest.MonkeyPatch) -> None:
    place, links, _ = listener
    monkeypatch.setattr(
        "muri.launcher.runtime.link.HANDSHAKE_TIMEOUT_S", 2 * DEADLINE_S
    )  # time alone ends none of them
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection((place.host, place.port))) for _ in range(200)]
        for junk in (b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 68, secrets.token_bytes(5000)):
            strangers.append(stack.enter_context(socket.create_connection((place.host, place.port))))
            strangers[-1].sendall(junk)
        over = threading.Event()
        sending = Asking(send_slowly, strangers[-60:], over, 10_000)
        sever(connect(peer(place), DEADLINE_S))
        until(lambda: len(links) == 1, "the rank with the key")
        over.set()
        sending.result(DEADLINE_S)


def test_a_stranger_has_one_time_limit_for_all_that_it_says(listener, monkeypatch: pytest.MonkeyPatch) -> None:
    place, _, _ = listener
    monkeypatch.setattr("muri.launcher.runtime.link.HANDSHAKE_TIMEOUT_S", 0.5)
    with socket.create_connection((place.host, place.port)) as raw:
        over = threading.Event()
        sending = Asking(send_slowly, [raw], over, 60)
        with contextlib.suppress(ConnectionResetError):
            while raw.recv(4096):
                pass
        over.set()
        assert sending.result(DEADLINE_S) < 60, "it was heard to the end"


def test_a_rank_connects_once(listener) -> None:
    place, links, _ = listener
    link = connect(peer(place), DEADLINE_S)
    until(lambda: len(links) == 1, "the first")
    for rank in (1, 2, 0):
        with pytest.raises(RankLinkError):
            connect(peer(place, rank), 0.2)
    sever(link)
    assert len(links) == 1


def test_a_rank_waits_for_rank_0_that_starts_later_but_not_for_ever() -> None:
    clock, links = VirtualClock(), list[RankLink]()
    place = Place(0, 2, "127.0.0.1", free_port(), KEY)
    with pytest.raises(RankLinkError, match="within 20 s"):
        connect(peer(place), 20.0, clock)
    assert 20.0 <= clock() < 20.0 + 2 * RETRY_S
    listeners: list[Listener] = []

    def start() -> None:
        clock.sleep(12.34)
        listeners.append(Listener(place, links.append))

    begin_s = clock()
    clock.start(start)
    sever(connect(peer(place), 20.0, clock))
    assert 12.34 <= clock() - begin_s < 12.34 + RETRY_S
    listeners[0].close()


@pytest.mark.parametrize(
    ("rank", "cause"),
    [(0, "not all of the other 2 ranks came in 60 s"), (1, "rank 1 could not reach rank 0 .* within 60 s")],
)
def test_a_group_without_one_of_its_ranks_is_given_up(rank: int, cause: str) -> None:
    clock = VirtualClock()
    ranks = Noting(Place(rank, 3, "127.0.0.1", free_port(), KEY), clock)
    clock.finish(clock.start(ranks._gather))
    assert 60.0 <= clock() < 60.0 + 2 * RETRY_S
    assert re.match(cause, ranks.lost)


def test_rank_0_is_known_by_the_key_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        place = Place(1, 2, "127.0.0.1", impostor.getsockname()[1], KEY)

        def pretend() -> None:
            raw, _ = impostor.accept()
            raw.sendall(b"c" * 32)
            raw.recv(4096)
            raw.sendall(b"0" * 32)

        Asking(pretend)
        with pytest.raises(RankLinkError, match="does not know the group's key"):
            connect(place, 0.0)


def test_a_message_that_makes_no_sense_ends_the_group(group: Group) -> None:
    group.ranks[1]._links[0].send({"grant": ["1", "0"]})
    until(lambda: 0 in group.lost(), "rank 0 to give up")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID is 4 and must be 0 to 3"),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID is -1"),
        ({"SLURM_LAUNCH_NODE_IPADDR": ""}, "needs rank 0's node"),
        ({PORT_VARIABLE: "0"}, "MURI_GROUP_PORT, not '0'"),
        ({KEY_VARIABLE: "short"}, "32 characters"),
    ],
)
def test_a_place_comes_from_slurm_and_in_full(variables: dict[str, str], message: str) -> None:
    srun = {"SLURM_PROCID": "3", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}
    environment = {KEY_VARIABLE: "k" * 64, PORT_VARIABLE: "5", **srun}
    assert parse_place(4, environment) == Place(3, 4, "10.0.0.1", 5, KEY)
    assert parse_place(1, environment) is None
    with pytest.raises(UsageError, match=message):
        parse_place(4, environment | variables)


def test_a_task_is_read_from_torchrun_or_srun() -> None:
    srun = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}
    assert task_of({}) == (0, 1)
    assert task_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) == (0, 1), "a batch script is one process"
    assert task_of(srun) == (3, 4)
    assert task_of({**srun, "RANK": "1", "WORLD_SIZE": "2"}) == (1, 2)


def test_a_task_learns_where_its_rank_0_is() -> None:
    step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[3-4]", "SLURM_JOB_ID": "7"}
    given = missing_variables(step)
    assert given["MASTER_ADDR"] == "n3"
    assert 15000 <= int(given["MASTER_PORT"]) < 30000
    assert missing_variables({**step, "SLURM_PROCID": "0"}) == given
    assert missing_variables({**step, "MASTER_PORT": "1", "MASTER_ADDR": "x"}) == {}
    assert missing_variables({"SLURM_JOB_ID": "7"}) == {}


def test_runs_of_a_script_are_told_apart() -> None:
    assert session_key({"SLURM_STEP_ID": "1"}) != session_key({"SLURM_STEP_ID": "2"})
    assert session_key({"SLURM_RESTART_COUNT": "1"}) != session_key({})
