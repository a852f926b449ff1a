"""How pairs that share without turns slow each other down is learned while they train."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fake_slurm import FOUR_KINDS, FakeSlurm, group_at_work, one_cycle, pilots, speeds_report

from muri.profiler.interference import Interference, by_pair, every_pair, find, put
from muri.profiler.records import ProfileKey
from muri.profiler.store import ProfileStore
from muri.slurm_plugin.records.journal import PAIR

Make = Callable[..., Any]
ALICES = tuple(replace(each, key=replace(each.key, user="alice"), measured_at="2020-01-01") for each in FOUR_KINDS[:2])
M1, M2 = (ProfileKey(name, 8, 1, "gpu", "alice") for name in ("m1", "m2"))


def running_pair(make_controller: Make) -> FakeSlurm:
    return group_at_work(make_controller, ALICES, count=2)


def tell(slurm: FakeSlurm, iterations: int, times_s: tuple[float, float], discipline: str = "plain") -> None:
    """Let the pilot job tell of its members; both models take a second alone."""
    speeds = {number: 1 / seconds for number, seconds in enumerate(times_s, 1)}
    (pilot,) = pilots(slurm)
    slurm.jobs[pilot.job_id] = replace(pilot, comment=speeds_report(speeds, iterations, discipline))


def cycle(slurm: FakeSlurm, make_controller: Make, policy: str = "auto") -> None:
    slurm.now_s += 60
    one_cycle(make_controller, slurm, policy=policy, tuning={"drift_limit": 0})


def teach(
    slurm: FakeSlurm, make_controller: Make, rounds: Sequence[tuple[float, float]], first: int = 1,
    discipline: str = "plain", policy: str = "auto", each: int = 100,
) -> None:  # fmt: skip
    """A cycle for each round; members have done so many iterations more in each."""
    for number, times_s in enumerate(rounds, first):
        tell(slurm, each * number, times_s, discipline)
        cycle(slurm, make_controller, policy)


def learned(store: ProfileStore, *, turns: bool = False) -> Interference | None:
    return find(by_pair(pair for pair in every_pair(store) if pair.turns == turns), M1, M2)


def test_a_pair_without_turns_is_learned_in_a_few_cycles(make_controller: Make, store: ProfileStore) -> None:
    slurm = running_pair(make_controller)
    for number, times_s in enumerate([(1.5, 1.2), (1.52, 1.18), (1.48, 1.22)], 1):
        assert learned(store) is None
        tell(slurm, 100 * number, times_s)
        for _ in range(2):  # the same report is one round
            cycle(slurm, make_controller)
    found = learned(store)
    assert found is not None
    assert (found.a.key, found.b.key, found.rounds) == (M1, M2, 3)
    assert (found.a.ratio, found.b.ratio) == (pytest.approx(1.5, rel=1e-3), pytest.approx(1.2, rel=1e-3))
    assert found.confidence > 0.8
    assert (found.source, found.turns) == ("learned", False)
    assert (found.a.solo_s, found.a.iterations) == (pytest.approx(1.0), 300)


@pytest.mark.parametrize(("discipline", "first"), [("fair", 100), ("lockstep", 100), ("plain", 1)])
def test_turns_and_warm_ups_teach_nothing(
    make_controller: Make, store: ProfileStore, discipline: str, first: int
) -> None:
    slurm = running_pair(make_controller)
    teach(slurm, make_controller, [(1.5, 1.2)] * 4, discipline=discipline, each=first)
    assert learned(store) is None


def test_policies_that_plan_on_pairs_learn_those_in_turns_apart(make_controller: Make, store: ProfileStore) -> None:
    slurm = running_pair(make_controller)
    teach(slurm, make_controller, [(1.9, 1.2), (1.92, 1.18), (1.88, 1.22)], discipline="fair", policy="sjf-bsbf")
    found = learned(store, turns=True)
    assert found is not None
    assert (found.a.ratio, found.b.ratio) == (pytest.approx(1.9, rel=1e-3), pytest.approx(1.2, rel=1e-3))
    assert (found.source, found.turns, found.rounds) == ("learned", True, 3)
    assert learned(store) is None


def test_a_change_of_the_discipline_begins_a_new_course(make_controller: Make, store: ProfileStore) -> None:
    slurm = running_pair(make_controller)
    for number, discipline in enumerate(["fair", "fair", "plain", "plain", "fair", "fair"], 1):
        tell(slurm, 100 * number, (1.5, 1.2), discipline)
        cycle(slurm, make_controller, "sjf-bsbf")
    assert learned(store) is None
    assert learned(store, turns=True) is None


def test_the_newest_rounds_count_and_older_ones_fade(make_controller: Make, store: ProfileStore) -> None:
    slurm = running_pair(make_controller)
    teach(slurm, make_controller, [(1.2, 1.2)] * 12 + [(1.8, 1.4)] * 11)
    found = learned(store)
    assert found is not None
    assert (found.rounds, len(found.samples)) == (20, 20)
    assert (found.a.ratio, found.b.ratio) == (pytest.approx(1.8), pytest.approx(1.4))


def test_what_other_jobs_of_the_pair_showed_counts_on(make_controller: Make, store: ProfileStore) -> None:
    slurm = running_pair(make_controller)
    teach(slurm, make_controller, [(1.5, 1.2)] * 4)
    (pilot,) = pilots(slurm)
    with make_controller(slurm) as muri:  # as if the pair had ended and come together again
        muri._journal.forget_fact(PAIR, str(pilot.job_id))
    teach(slurm, make_controller, [(1.6, 1.3)] * 3, first=5)
    found = learned(store)
    assert found is not None
    assert [round(first, 1) for first, _ in found.samples] == [1.5] * 4 + [1.6] * 3


def test_a_surer_measurement_stays(make_controller: Make, store: ProfileStore) -> None:
    slurm = running_pair(make_controller)
    teach(slurm, make_controller, [(1.1 + 0.5 * number, 3.0 - 0.5 * number) for number in range(4)])
    found = learned(store)
    assert found is not None
    sides = (replace(side, ratio=1.3, confidence=0.99) for side in (found.a, found.b))
    put(store, Interference(*sides, rounds=5, measured_s=30.0, measured_at=found.measured_at))
    teach(slurm, make_controller, [(1.5, 1.2)], first=10)
    found = learned(store)
    assert found is not None
    assert (found.a.ratio, found.confidence) == (1.3, 0.99)
