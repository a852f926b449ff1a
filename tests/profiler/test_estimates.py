"""Estimates of profiles from other GPU counts."""

import re
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_builders import make_profile

from muri.profiler.estimates import (
    BANDWIDTH_KIND,
    Bandwidth,
    bandwidths,
    estimates_of,
    nearest_bandwidth,
    scale,
)
from muri.profiler.records import Document, ProfileDetail, ProfileKey
from muri.profiler.store import ProfileStore


def document(bandwidth):
    """As a command of 0.2 stored it."""
    body = asdict(bandwidth)
    return Document(bandwidth.name, body.pop("measured_at"), body)


A100 = Bandwidth("gpu", nodes=1, ranks_per_node=4, mib_per_s=1000.0, latency_s=1e-3)


def key(gpu_count, **changes):
    return ProfileKey(**({"model": "resnet18", "batch_size": 64, "gpu_count": gpu_count, "gpu_type": "gpu"} | changes))


def one_gpu(gradient_mib=None, **changes):
    return make_profile(**({"synchronize_s": 0.0, "detail": ProfileDetail(gradient_mib=gradient_mib)} | changes))


def test_one_gpu_and_a_measured_bandwidth_give_four():
    base = one_gpu(100.0)
    found = scale([base], key(4), [A100])
    assert found.profile.synchronize_s == pytest.approx(1.5 * 0.1 + 6e-3)
    assert found.profile.iteration_s == pytest.approx(0.48 + found.profile.synchronize_s)
    assert found.profile.stage_s[:3] == base.stage_s[:3]
    assert (found.profile.source, found.profile.iterations) == ("scaled", 0)
    assert found.profile.is_estimate
    assert found.basis[0] == "load, preprocess and propagate as measured on 1 × gpu"
    assert "1000 MiB/s as measured on gpu/4x1" in found.basis[1]
    assert "ASSUMED" not in " ".join(found.basis)


def test_the_models_own_all_reduce_counts_more_than_a_bandwidth():
    profiles = [one_gpu(100.0), make_profile(gpu_count=2, synchronize_s=0.042, iteration_s=0.52)]
    found = scale(profiles, key(8), [A100])
    assert found.basis[0] == "load, preprocess and propagate as measured on 2 × gpu"
    assert found.profile.synchronize_s == pytest.approx(1.75 * 0.040 + 14e-3)
    assert found.profile.iteration_s == pytest.approx(0.52 + found.profile.synchronize_s - 0.042)
    assert "the model's own on 2 GPUs" in found.basis[1]


def test_what_was_hidden_stays_hidden():
    busy = ProfileDetail(busy_s=(0.12, 0.05, 0.3, 0.10))
    base = make_profile(gpu_count=2, synchronize_s=0.04, iteration_s=0.51, detail=busy)
    found = scale([base], key(4), [Bandwidth("gpu", 1, 4, 1000.0, 0.0)])
    assert found.profile.synchronize_s == pytest.approx(1.5 * 0.10 - 0.06)


def test_what_the_network_does_on_one_gpu_too_is_no_all_reduce():
    """A parameter server, or samples from another node."""
    alone = one_gpu(100.0, synchronize_s=0.05, iteration_s=0.52)
    assert scale([alone], key(4), [A100]).profile.synchronize_s == pytest.approx(0.05 + 0.156)
    both = [alone, make_profile(gpu_count=2, synchronize_s=0.092, iteration_s=0.56)]
    assert scale(both, key(4), [A100]).profile.synchronize_s == pytest.approx(0.05 + 1.5 * 0.04 + 6e-3)
    assert scale(both[1:], key(1), [A100]).profile.synchronize_s == 0.0


@pytest.mark.parametrize(
    "changes", [{"batch_size": 32}, {"gpu_type": "a100"}, {"model": "vgg16"}, {"gpu_count": 4}, {"source": "predicted"}]
)
def test_only_measured_profiles_of_the_same_model_serve(changes):
    assert scale([one_gpu(100.0, **changes)], key(4)) is None


counts = st.integers(1, 4096)


@given(counts, counts, st.floats(0, 1e6), st.floats(50, 1e6), st.floats(0, 1), st.floats(0, 10), st.floats(1e-3, 10))
def test_an_estimate_is_always_a_valid_profile(count, wanted, gradient_mib, mib_per_s, latency_s, sync_s, iteration_s):
    base = one_gpu(gradient_mib, gpu_count=count, synchronize_s=sync_s, iteration_s=iteration_s)
    found = scale([base], key(wanted), [Bandwidth("gpu", 1, 2, mib_per_s, latency_s)])
    assert (found is None) == (count == wanted)
    if found:
        assert found.profile.iteration_s >= max(found.profile.stage_s[:3])


def test_the_bandwidth_of_the_nearest_number_of_ranks_serves():
    eight, two, other = Bandwidth("gpu", 2, 4, 10.0, 0.0), Bandwidth("gpu", 1, 2, 99.0, 0.0), Bandwidth("x", 1, 3, 5, 0)
    assert nearest_bandwidth([two, eight, other], "gpu", 3) is two
    assert nearest_bandwidth([two, eight, other], "gpu", 4) is eight  # as near as two; the one across nodes is slower
    assert nearest_bandwidth([two, eight, other], "gpu", 64) is eight
    assert nearest_bandwidth([two], "a100", 2) is None


def test_bandwidths_are_kept_in_the_store(tmp_path, caplog):
    with ProfileStore(tmp_path / "p.db") as store:
        store.put_document(BANDWIDTH_KIND, document(A100))
        assert bandwidths(store) == (A100,)
        store.put_document(BANDWIDTH_KIND, Document("x/2x1", "", {"gpu_type": "x", "nodes": 1}))
        assert bandwidths(store) == (A100,)
    assert re.search(r"bandwidth x/2x1 in the store: .*ranks_per_node", caplog.text)


def test_an_estimate_of_one_user_rests_on_no_other_users_profiles(tmp_path):
    alices, bobs = key(4, user="alice"), key(4, user="bob")
    with ProfileStore(tmp_path / "p.db") as store:
        store.put(one_gpu(100.0, user="bob", propagate_s=0.4))
        assert estimates_of(store, [alices, bobs]).keys() == {bobs}
        store.put(one_gpu(100.0, propagate_s=0.2))
        found = estimates_of(store, [alices, bobs])
    assert {each: profile.propagate_s for each, profile in found.items()} == {alices: 0.2, bobs: 0.4}
    assert found[bobs].key == bobs


def test_what_cannot_be_true_costs_one_estimate(tmp_path, caplog):
    with ProfileStore(tmp_path / "p.db") as store:
        store.put_all([one_gpu(1e8, model="huge"), one_gpu(1e-3)])
        store.put_document(BANDWIDTH_KIND, document(Bandwidth("gpu", 1, 2, 1e-6, 0.0)))
        found = estimates_of(store, [replace(key(4), model="huge"), key(2), replace(key(2), gpu_count=0)])
    assert found.keys() == {key(2)}
    assert "no estimate of huge" in caplog.text


def test_a_measured_profile_counts_more_than_an_estimate(tmp_path):
    with ProfileStore(tmp_path / "p.db") as store:
        store.put(one_gpu(100.0))
        assert estimates_of(store, [key(1), key(4)])[key(4)].source == "scaled"
        store.put(make_profile(gpu_count=4))
        assert estimates_of(store, [key(1), key(4)]) == {}


def test_network_use_of_one_gpu_is_no_hidden_all_reduce():
    base = one_gpu(100.0, detail=ProfileDetail(gradient_mib=100.0, busy_s=(0.12, 0.05, 0.3, 10.0)))
    assert scale([base], key(4), [A100]).profile.synchronize_s == pytest.approx(0.156)
