"""Who owns the time where resources are used at once (Muri, section 4.2)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muri.profiler.dryrun.attribution import USE_THRESHOLD, Interval, attribute
from muri.profiler.records import STAGES

LOAD, PREPROCESS, PROPAGATE, SYNCHRONIZE = range(4)
WINDOW = 24


def owned(*intervals, window=(0, 10)):
    return attribute(intervals, *window).owned_s


def test_hidden_work_owns_only_what_the_loop_waits_for():
    prefetch, loop = Interval(LOAD, 0, 8), Interval(PROPAGATE, 2, 5, own=True)
    found = attribute([prefetch, loop], 0, 10)
    assert found.owned_s == (5, 0, 3, 0)
    assert found.busy_s == (8, 0, 3, 0)


intervals = st.builds(
    lambda stage, start, length, use, own: Interval(stage, start, start + length, use, own),
    st.integers(0, 3),
    st.integers(-4, WINDOW),
    st.integers(0, 12),
    st.sampled_from([0.02, 0.25, 0.5, 1.0]),
    st.booleans(),
)


def by_definition(parts, at):
    """Owners of the unit of time from `at` on, and who is busy; on whole numbers nothing changes within it."""
    going = [part for part in parts if part.start_s <= at and part.end_s >= at + 1]
    own = [part for part in going if part.own]
    use = [min(1.0, sum(part.use for part in going if part.stage == stage and not part.own)) for stage in range(4)]
    latest = {part.stage for part in own if part.start_s == max(other.start_s for other in own)}
    if own:
        return latest, use
    top = max(use)
    return ({stage for stage in range(4) if use[stage] == top} if top >= USE_THRESHOLD else set()), use


@given(st.lists(intervals, max_size=12))
def test_as_the_definition_says_at_every_instant(parts):
    found = attribute(parts, 0, WINDOW)
    expected = [0.0] * len(STAGES)
    for at in range(WINDOW):
        owners, _ = by_definition(parts, at)
        if any(part.own for part in parts) and len(owners) > 1:
            return  # two holds of the loop's thread began at one instant: any of them may count
        for stage in owners:
            expected[stage] += 1 / len(owners)
    assert found.owned_s == pytest.approx(expected)
