"""Properties of the queue, in a model without threads: one resource, and a clock that jumps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muri.launcher.arbitration.fairness import FairQueue

lengths = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=4)


def serve_one_resource(solo_s: list[float], window_s: float, weight: float, total_s: float) -> list[float]:
    """Every member always wants the one resource for whole iterations; the normalized rates that result."""
    queue = FairQueue(window_s, weight)
    names = [str(101 + index) for index in range(len(solo_s))]
    for name, seconds in zip(names, solo_s, strict=True):
        queue.join(name, seconds)
    now_s, done = 0.0, dict.fromkeys(names, 0)
    while now_s < total_s:
        for name in names:
            queue.catch_up(name)
        name = queue.order(names, 2)[0]
        seconds = solo_s[names.index(name)]
        queue.served(name, 2, seconds)
        queue.iteration_done(name, seconds, (0.0, 0.0, seconds, 0.0))
        done[name] += 1
        now_s += seconds
    return [done[name] * seconds / now_s for name, seconds in zip(names, solo_s, strict=True)]


@given(lengths)
@settings(max_examples=25, deadline=None)
def test_contested_resource_gives_equal_normalized_progress(solo_s: list[float]) -> None:
    rates = serve_one_resource(solo_s, window_s=1e9, weight=0.0, total_s=200 * max(solo_s))
    assert max(rates) - min(rates) <= 2 / 200 + 1e-9


@given(lengths, st.floats(0.1, 5.0), st.floats(0.0, 6.0))
@settings(max_examples=25, deadline=None)
def test_nobody_starves_whatever_the_settings(solo_s: list[float], window_s: float, weight: float) -> None:
    # A stage may be passed over while others are within `weight` times its length ahead of it.
    rates = serve_one_resource(solo_s, window_s + 7 * max(solo_s), weight, total_s=400 * max(solo_s))
    assert min(rates) > 0.5 / len(solo_s)


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=5))
def test_newcomer_starts_at_the_smallest_virtual_time(progress: list[float]) -> None:
    queue = FairQueue()
    for index in range(len(progress)):
        queue.join(f"1{index}", 1.0)
    for index, seconds in enumerate(progress):
        for _ in range(int(seconds)):
            queue.iteration_done(f"1{index}", 1.0, (1.0, 0.0, 0.0, 0.0))
    queue.join("200", 1.0)
    newcomer = queue.members.pop("200")
    assert newcomer.virtual_s == min(other.virtual_s for other in queue.members.values())


@given(st.permutations(["99", "100", "101", "1000"]))
def test_ties_go_to_the_smallest_id(waiting: list[str]) -> None:
    queue = FairQueue()
    for member in waiting:
        queue.join(member, 1.0)
    assert queue.order(waiting, 0) == ["99", "100", "101", "1000"]


def test_short_stage_goes_before_a_long_one_of_a_member_equally_far() -> None:
    queue = FairQueue()
    for member, seconds in (("1", 0.5), ("2", 0.02)):
        queue.join(member, 1.0)
        queue.iteration_done(member, 1.0, (0.0, 0.0, seconds, 0.0))
    assert queue.order(["1", "2"], 2)[0] == "2"
    assert queue.order(["1", "2"], 0)[0] == "1"


def test_solo_time_is_learned_from_busy_times_unless_planned() -> None:
    queue = FairQueue()
    queue.join("1")
    queue.join("2", 0.25)
    for member in ("1", "2"):
        queue.iteration_done(member, 4.0, (4.0, 0.0, 0.0, 0.0))
    assert queue.members["1"].virtual_s == 4.0
    assert queue.members["2"].virtual_s == 0.25


@pytest.mark.parametrize(("long_s", "least"), [(0.7, 0.08), (10.0, 0.3)])
def test_long_stages_get_on_behind_short_ones_that_saturate_the_resource(long_s: float, least: float) -> None:
    queue = FairQueue()
    stage_s = {"1": 0.02, "2": 0.02, "3": 0.02, "4": long_s}
    for name, seconds in stage_s.items():
        queue.join(name, seconds)
        queue.iteration_done(name, seconds, (0.0, 0.0, seconds, 0.0))
    since_s, served_s = dict.fromkeys(stage_s, 0.0), dict.fromkeys(stage_s, 0.0)
    now_s = 0.0
    while now_s < 60.0 * long_s:
        for name in stage_s:
            queue.catch_up(name)
        name = queue.order(stage_s, 2, {other: now_s - since_s[other] for other in stage_s})[0]
        now_s += stage_s[name]
        since_s[name] = now_s
        served_s[name] += stage_s[name]
        queue.iteration_done(name, stage_s[name], (0.0, 0.0, stage_s[name], 0.0))
    assert min(served_s.values()) > 0.08 * now_s
    assert served_s["4"] > least * now_s
