"""The form of a trace file, and the threads that it names."""

from itertools import pairwise
from typing import Any


def require_valid(events: list[dict[str, Any]]) -> None:
    """The rules of the trace-event format that viewers rely on."""
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert event["ph"] in {"M", "X", "i"}
        if event["ph"] != "M":
            assert isinstance(event["ts"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] == "t"
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in slices} <= named
    for tid in named:  # slices of one thread are nested or apart; ours are never nested
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == tid)
        assert all(before[1] <= after[0] for before, after in pairwise(own)), tid


def names_of_threads(events: list[dict[str, Any]]) -> list[str]:
    return [event["args"]["name"] for event in events if event["name"] == "thread_name"]
