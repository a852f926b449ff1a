"""Newcomers: few at a time, and none for long."""

import socket
from contextlib import ExitStack

from virtual_clock import VirtualClock

from muri.newcomers import Newcomers


def ended(raw: socket.socket) -> bool:
    raw.setblocking(False)
    try:
        return raw.recv(1) == b""
    except BlockingIOError:
        return False


def test_the_oldest_ends_for_one_more_and_each_after_a_time() -> None:
    clock = VirtualClock()
    newcomers = Newcomers(3, clock)
    with ExitStack() as stack:
        pairs = [tuple(map(stack.enter_context, socket.socketpair())) for _ in range(5)]
        for ours, _ in pairs:
            newcomers.add(ours)
            clock.sleep(1.0)
        assert [ended(theirs) for _, theirs in pairs] == [True, True, False, False, False]
        assert [newcomers.take(ours) for ours, _ in pairs[1:3]] == [False, True]
        pairs[3][1].send(b"speaks")
        newcomers.end_older(2.0)
        assert [ended(theirs) for _, theirs in pairs] == [True, True, False, True, False]
