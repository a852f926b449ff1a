"""Measured interference: the table, and the model that uses it."""

import dataclasses

import numpy as np
import pytest
from speed_builders import one_group, shape

from muri.policies.lockstep import Lockstep
from muri.policies.speed import Fair, Measured
from muri.policies.traits import InterferenceError, InterferenceTable, PairSpeed

RESNET = "ResNet-18 (batch size 64)"
TABLE = InterferenceTable(
    (
        PairSpeed("A3C", "A3C", 0.5097, 0.5097),
        PairSpeed("A3C", "CycleGAN", 0.6358, 0.7147),
        PairSpeed("CycleGAN", "A3C", 0.7147, 0.6358),
        PairSpeed("CycleGAN", RESNET, 0.8, 0.6),
        PairSpeed("A3C", RESNET, 0.7464, 1.0),
    )
)
MODEL = Measured(TABLE, Lockstep())


def job(model, *stage_s):
    return shape(*(stage_s or (1, 1, 1, 1)), model=model)


def speeds(*members, model=MODEL):
    return model.evaluate(members, one_group(len(members))).speed[0]


def test_pairs_are_found_either_way_round():
    assert TABLE.speeds("A3C", "CycleGAN") == (0.6358, 0.7147)
    assert TABLE.speeds("CycleGAN", "A3C") == (0.7147, 0.6358)
    assert TABLE.speeds(RESNET, "CycleGAN") == (0.6, 0.8)
    assert TABLE.speeds("A3C", "A3C") == (0.5097, 0.5097)
    assert TABLE.speeds("A3C", "BERT") is None
    assert TABLE.models == {"A3C", "CycleGAN", RESNET}
    assert len(TABLE.pairs) == 4, "the mirrored row says the same"


def test_a_measured_pair_runs_as_measured():
    found = MODEL.evaluate([job("A3C", 2, 0, 0, 0), job("CycleGAN", 0, 1, 1, 0)], np.array([[0, 1], [1, 0], [0, 0]]))
    assert found.speed.tolist() == [[0.6358, 0.7147], [0.7147, 0.6358], [0.5097, 0.5097]]
    # u is (1, 0, 0, 0) and (0, 0.5, 0.5, 0).
    assert found.efficiency == pytest.approx([(0.6358 + 0.7147) / 4, (0.6358 + 0.7147) / 4, 2 * 0.5097 / 4])
    assert np.isnan(found.period_s).all()


def test_three_members_multiply_what_each_partner_costs():
    found = speeds(job("A3C"), job("CycleGAN"), job(RESNET))
    assert found == pytest.approx([0.6358 * 0.7464, 0.7147 * 0.8, 1.0 * 0.6])


def test_a_pair_that_was_not_measured_is_left_to_the_other_model():
    known, unknown = job("A3C", 3, 1, 1, 1), job("BERT", 0, 3, 0, 0)
    assert speeds(known, unknown).tolist() == [1.0, 0.5], "as the lockstep model has it"
    fair = Measured(TABLE, Fair())
    assert speeds(known, unknown, model=fair) == pytest.approx(Fair().evaluate([known, unknown], one_group(2)).speed[0])
    # Of three members one pair was measured; the other two pairs come from the fallback.
    other = job("CycleGAN", 3, 1, 1, 1)
    pair = Lockstep().evaluate([known, unknown, other], np.array([[0, 1], [2, 1]])).speed
    expected = [0.6358 * pair[0, 0], pair[0, 1] * pair[1, 1], 0.7147 * pair[1, 0]]
    assert speeds(known, unknown, other) == pytest.approx(expected)


def test_measuring_error_above_one_is_cut_off():
    table = InterferenceTable((PairSpeed("a", "b", 1.04, 0.5), PairSpeed("c", "c", 0.4, 0.6)))
    assert table.speeds("b", "a") == (0.5, 1.0)
    assert table.speeds("c", "c") == (0.5, 0.5), "nothing tells two jobs of one model apart"
    assert table.rows[0].speed_a == 1.04
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.rows = ()


@pytest.mark.parametrize("speed", [0.0, -0.1, 1.06, float("nan"), float("inf")])
def test_impossible_speeds_are_refused(speed):
    with pytest.raises(InterferenceError, match=r"a with b: speed of b is .*; it must be above 0 and at most 1.05"):
        PairSpeed("a", "b", 0.5, speed)


def test_contradictions_and_nameless_models_are_refused():
    with pytest.raises(InterferenceError, match="b with a is there twice and differs"):
        InterferenceTable((PairSpeed("a", "b", 0.5, 0.6), PairSpeed("b", "a", 0.5, 0.6)))
    with pytest.raises(InterferenceError, match="names of two models"):
        PairSpeed("a", "", 0.5, 0.5)
