"""The ledger gives each second to one stage at most, whatever threads do in whatever order."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muri.launcher.job.time_ledger import NOBODY, OUTSIDE, TimeLedger
from muri.profiler.records import STAGES

STAGE = st.integers(0, len(STAGES) - 1)
CLAIMS = st.lists(st.integers(0, 10), min_size=len(STAGES), max_size=len(STAGES)).map(
    lambda parts: [part / max(10, sum(parts)) for part in parts]
)
PASSES = st.integers(0, 50).map(lambda ticks: ticks / 8)
EVENT = st.one_of(
    st.tuples(st.just("own"), st.one_of(STAGE, st.sampled_from([OUTSIDE, NOBODY]))),
    st.tuples(st.just("begin beside"), STAGE),
    st.tuples(st.just("end beside"), STAGE),
    st.tuples(st.just("end_gap"), CLAIMS),
    st.tuples(st.just("told"), PASSES),
    st.tuples(st.just("move"), st.tuples(STAGE, STAGE, PASSES)),
)


def play(ledger: TimeLedger, kind: str, value, now_s: float, within_s: float, beside: list[int]) -> None:
    match kind:
        case "own":
            ledger.own(value, now_s)
        case "begin beside":
            beside[value] += 1
            ledger.beside(value, 1, now_s)
        case "end beside" if beside[value]:
            beside[value] -= 1
            ledger.beside(value, -1, now_s)
        case "end_gap":
            ledger.end_gap(now_s, value)
        case "told":
            ledger.told(2, value, within_s, now_s)
        case "move":
            ledger.move(*value)


@given(st.lists(st.tuples(PASSES, EVENT), max_size=60), PASSES)
def test_stages_never_own_more_than_the_time_that_passed(events, last_s) -> None:
    ledger, now_s, waited_s, beside, state = TimeLedger(0.0), 0.0, Fraction(0), [0] * len(STAGES), OUTSIDE
    for passes_s, (kind, value) in events:
        now_s += passes_s
        waited_s += Fraction(passes_s) if state == NOBODY else 0
        state = value if kind == "own" else state
        play(ledger, kind, value, now_s, now_s - float(waited_s), beside)
    now_s += last_s
    waited_s += Fraction(last_s) if state == NOBODY else 0
    owned = ledger.settle(now_s)
    assert all(seconds >= -1e-9 for seconds in owned)
    assert sum(owned) <= now_s - float(waited_s) + 1e-9
    assert owned == pytest.approx(ledger.total_s)


def test_other_threads_own_the_time_while_the_loop_is_in_no_stage() -> None:
    ledger = TimeLedger(0.0)
    ledger.beside(0, 1, 0.0)
    ledger.beside(1, 1, 2.0)
    ledger.beside(0, -1, 6.0)  # together for 4 s
    ledger.own(2, 7.0)
    ledger.beside(1, -1, 10.0)
    assert ledger.settle(10.0) == (4.0, 3.0, 3.0, 0.0)
    assert ledger.hidden_s == [0.0, 3.0, 0.0, 0.0]


def test_what_the_loop_claims_of_a_gap_hides_the_others() -> None:
    ledger = TimeLedger(0.0)
    ledger.beside(0, 1, 0.0)
    ledger.end_gap(8.0, (0.0, 0.75, 0.0, 0.0))
    assert ledger.settle(8.0) == (2.0, 6.0, 0.0, 0.0)
    assert ledger.hidden_s[0] == 6.0


def test_an_iteration_begins_with_empty_accounts() -> None:
    ledger = TimeLedger(0.0)
    ledger.own(2, 1.0)
    ledger.begin_iteration(5.0)
    assert ledger.settle(6.0) == (0.0, 0.0, 1.0, 0.0)
    assert ledger.total_s[2] == 5.0
