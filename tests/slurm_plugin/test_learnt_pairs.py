"""How pairs that share without turns slow each other down is learnt while they train."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FOUR_KINDS, FakeSlurm, four_jobs, one_gpu, pilots

from muri.profiler.interference.ratios import Interference, by_pair, find, known_pairs, put
from muri.profiler.records import STAGES, ProfileKey
from muri.profiler.store import ProfileStore
from muri.slurm_plugin.records.comment_reports import speeds_token

Make = Callable[..., Any]
ALICES = tuple(replace(each, key=replace(each.key, user="alice"), measured_at="2020-01-01") for each in FOUR_KINDS[:2])
M1, M2 = (ProfileKey(name, 8, 1, "gpu", "alice") for name in ("m1", "m2"))


def running_pair(make_controller: Make) -> FakeSlurm:
    slurm = FakeSlurm(four_jobs()[:2], one_gpu())
    with make_controller(slurm, ALICES, profiling={"mode": "in-place"}) as controller:
        controller.cycle()
    for _ in range(3):
        slurm.tick()
    (pilot,) = pilots(slurm)
    assert pilot.state == "RUNNING"
    return slurm


def tell(slurm: FakeSlurm, iterations: int, times_s: tuple[float, float], discipline: str = "plain") -> None:
    """Let the pilot job tell of its members; both models take a second alone."""
    none_s = dict.fromkeys(STAGES, 0.0)
    members = {
        str(number): {"iterations": iterations, "iterations_per_s": 1 / seconds, "stage_s": none_s, "wait_s": none_s}
        for number, seconds in enumerate(times_s, 1)
    }
    (pilot,) = pilots(slurm)
    slurm.jobs[pilot.job_id] = replace(pilot, comment=speeds_token({"members": members, "discipline": discipline}))


def cycle(slurm: FakeSlurm, make_controller: Make) -> None:
    slurm.now_s += 60
    with make_controller(slurm, profiling={"mode": "in-place"}, profiles={"drift_limit": 0}) as controller:
        controller.cycle()


def learnt(folder: Path) -> Interference | None:
    with ProfileStore(folder / "profiles.db", read_only=True) as store:
        return find(by_pair(known_pairs(store)), M1, M2)


def test_a_pair_without_turns_is_learnt_in_a_few_cycles(make_controller: Make, tmp_path: Path) -> None:
    slurm = running_pair(make_controller)
    for number, times_s in enumerate([(1.5, 1.2), (1.52, 1.18), (1.48, 1.22)], 1):
        assert learnt(tmp_path) is None
        tell(slurm, 100 * number, times_s)
        for _ in range(2):  # the same report is one round
            cycle(slurm, make_controller)
    found = learnt(tmp_path)
    assert found is not None
    assert (found.a.key, found.b.key, found.rounds) == (M1, M2, 3)
    assert (found.a.ratio, found.b.ratio) == (pytest.approx(1.5, rel=1e-3), pytest.approx(1.2, rel=1e-3))
    assert found.confidence > 0.8
    assert (found.a.solo_s, found.a.iterations) == (pytest.approx(1.0), 300)


@pytest.mark.parametrize(("discipline", "first"), [("fair", 100), ("lockstep", 100), ("plain", 1)])
def test_turns_and_warm_ups_teach_nothing(make_controller: Make, tmp_path: Path, discipline: str, first: int) -> None:
    slurm = running_pair(make_controller)
    for number in range(4):
        tell(slurm, first * (number + 1), (1.5, 1.2), discipline)
        cycle(slurm, make_controller)
    assert learnt(tmp_path) is None


def test_a_surer_measurement_stays(make_controller: Make, tmp_path: Path) -> None:
    slurm = running_pair(make_controller)
    for number in range(4):
        tell(slurm, 100 * (number + 1), (1.1 + 0.5 * number, 3.0 - 0.5 * number))
        cycle(slurm, make_controller)
    found = learnt(tmp_path)
    assert found is not None
    with ProfileStore(tmp_path / "profiles.db") as store:
        put(store, replace(found, a=replace(found.a, ratio=1.3, confidence=0.99), b=replace(found.b, confidence=0.99)))
    tell(slurm, 1000, (1.5, 1.2))
    cycle(slurm, make_controller)
    found = learnt(tmp_path)
    assert found is not None
    assert (found.a.ratio, found.confidence) == (1.3, 0.99)
