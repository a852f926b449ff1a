"""Goodput: throughput over GPUs times the worth of a larger batch."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_builders import make_profile, profiles

from muri.policies.traits import BatchModel, goodput, iteration_model, model_of, relative_goodput


def measured_on(gpu_count, stage_s):
    profile = make_profile(stage_s)
    return replace(profile, key=replace(profile.key, gpu_count=gpu_count))


def test_fewer_gpus_by_hand():
    """8 of 10 seconds compute, 2 synchronize on 4 GPUs (ring 1.5): on 2 GPUs 16 s and 2·1/1.5 s, on one 32 s."""
    model = iteration_model(measured_on(4, (1.0, 1.0, 6.0, 2.0)))
    assert goodput(model, 4, 4) == pytest.approx(0.1)
    assert 1 / goodput(model, 4, 2) == pytest.approx(16 + 2 / 1.5)
    assert 1 / goodput(model, 4, 1) == pytest.approx(32)


def test_more_gpus_take_a_larger_batch_only_where_that_pays():
    """Twice the GPUs: the same batch takes 4 s + 2·1.75/1.5 s; with nothing to synchronize it takes half the time."""
    synchronizes = iteration_model(measured_on(4, (1.0, 1.0, 6.0, 2.0)))
    same_batch = 1 / (4 + 2 * 1.75 / 1.5)
    assert same_batch < goodput(synchronizes, 4, 8) < 2 * 0.1
    doubled = 2 * (5 / 6) / (8 + 2 * 1.75 / 1.5)
    assert goodput(synchronizes, 4, 8) >= max(same_batch, doubled)
    silent = iteration_model(measured_on(4, (0.0, 0.0, 8.0, 0.0)))
    assert relative_goodput(silent, 4, 8) == pytest.approx(2.0)


def test_a_batch_model_pays_its_fixed_part_in_every_accumulation_step():
    """α = 1 s, β·B = 4 s on 2 GPUs; one GPU computes both halves: 2·(1 + 4) s, and synchronizes with none."""
    model = BatchModel(8, 1.0, 0.5, communicate_s=3.0, overlap_exponent=float("inf"))
    assert 1 / goodput(model, 2, 2) == pytest.approx(5)
    assert 1 / goodput(model, 2, 1) == pytest.approx(10)


@given(profiles(), st.sampled_from((1, 2, 3, 4, 8, 16)), st.integers(1, 64))
def test_goodput_is_one_as_asked_for_and_never_more_than_the_gpus_would_give(profile, asked, gpu_count):
    model = iteration_model(replace(profile, key=replace(profile.key, gpu_count=asked)))
    assert relative_goodput(model, asked, asked) == 1.0
    found = relative_goodput(model, asked, gpu_count)
    assert found > 0
    assert gpu_count < asked or found <= gpu_count / asked * (1 + 1e-9)


def test_a_job_that_mostly_synchronizes_is_faster_on_one_gpu():
    """A tenth computes: twice that on one GPU, and nothing else; even where the profile shows no computing at all."""
    assert relative_goodput(iteration_model(measured_on(2, (0.0, 0.0, 1.0, 9.0))), 2, 1) == pytest.approx(5.0)
    assert relative_goodput(iteration_model(measured_on(2, (0.0, 0.0, 0.0, 9.0))), 2, 1) == pytest.approx(5.0)


def test_a_batch_model_that_computes_nothing_leaves_the_word_to_the_profile():
    profile = make_profile((0.0, 0.0, 1.0, 0.0))
    assert model_of(BatchModel(8, 0.0, 0.0, communicate_s=1.0), profile) == iteration_model(profile)
    assert model_of(None, None) is None
