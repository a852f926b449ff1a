"""Newcomers: few at a time, and none for long."""

import select
import socket

from virtual_clock import VirtualClock

from muri.newcomers import Newcomers


def test_the_oldest_ends_for_one_more_and_each_after_a_time() -> None:
    clock = VirtualClock()
    newcomers = Newcomers(3, clock)
    pairs = [socket.socketpair() for _ in range(5)]
    ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    for raw in ours:
        newcomers.add(raw)
        clock.sleep(1.0)
    assert select.select(theirs, [], [], 0.0)[0] == theirs[:2], "who was ended sees it"
    assert [newcomers.take(raw) for raw in ours[1:3]] == [False, True]
    theirs[3].send(b"speaks")
    newcomers.end_older(2.0)
    assert select.select(theirs, [], [], 0.0)[0] == [*theirs[:2], theirs[3]]
    for raw in (*ours, *theirs):
        raw.close()
