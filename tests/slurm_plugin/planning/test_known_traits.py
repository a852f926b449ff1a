"""Stored sensitivities become those that policies plan with."""

from dataclasses import asdict, replace

import pytest
from at_work import cycle_of, measured_pair
from fake_slurm import make_job, make_node

from muri.profiler.interference import PAIRS
from muri.profiler.records import Document, ProfileDetail, ProfileKey, StageProfile
from muri.profiler.sensitivity import SENSITIVITIES, CpuSensitivity, Dataset, Point, SensitivityProfile, throughput
from muri.profiler.store import ProfileStore
from muri.slurm_plugin.planning.cycle_input import Knowledge
from muri.slurm_plugin.planning.gathered import gather
from muri.slurm_plugin.planning.model_traits import (
    KnownTraits,
    batch_model,
    derived_for,
    interference_table,
    sensitivity_of,
)
from muri.slurm_plugin.planning.request import plan_job
from muri.slurm_plugin.profile_use import read_traits
from muri.slurm_plugin.records.cluster import NodeIndex

CURVE = CpuSensitivity((Point(2, 2.0), Point(4, 4.0), Point(9, 8.0), Point(12, 8.2)), 9, 0, 4)
DATASET = Dataset(dataset_gib=100.0, batch_mib=64.0, storage_mib_per_s=256.0)


def measured(name="hungry", **changes):
    return SensitivityProfile(**{"name": name, "measured_at": "2026-01-01T00:00:00Z", "cpu": CURVE, **changes})


def key(model, gpus=1):
    return ProfileKey(model, 8, gpus, "gpu")


def test_the_curve_over_cpus_is_the_measured_one():
    known = sensitivity_of(measured())
    assert known.cpus == (1.0, 2.0, 4.0, 9.0, 12.0)
    assert [known.throughput_at(cpus, 0.0) for cpus in (0, 1, 2, 3, 4)] == [1.0, 1.0, 2.0, 3.0, 4.0]
    # 9 and 12 CPUs differ by less than two runs do.
    assert [known.throughput_at(cpus, 0.0) for cpus in (9, 12, 40)] == [0.96 * 8.2] * 3
    assert known.demand == (9.0, 0.0)


def test_memory_follows_the_cache_model_above_what_the_processes_need():
    known = sensitivity_of(measured(dataset=DATASET, process_gib=3.0))
    for cache_gib in (0.0, 25.0, 100.0):
        assert known.throughput_at(9, 3.0 + cache_gib) == pytest.approx(throughput(DATASET, 0.96 * 8.2, cache_gib))
    assert known.throughput_at(9, 3.0) == pytest.approx(4.0)  # 256 MiB/s of storage feed 4 batches
    full = known.throughput_at(9, 103.0)
    assert full < 1.1001 * known.throughput_at(*known.demand)
    assert 3.0 < known.demand.mem_gib < 103.0


def test_gpus_of_a_job_share_the_cache_and_the_storage():
    one, four = sensitivity_of(measured(dataset=DATASET)), sensitivity_of(measured(dataset=DATASET), 4)
    assert four.mem_gib[-1] == pytest.approx(25.0)
    assert four.throughput_at(9, 0.0) == pytest.approx(1.0)  # a quarter of the storage for each
    assert four.throughput_at(9, 25.0) == one.throughput_at(9, 100.0)
    assert four.demand.cpus == one.demand.cpus


def test_a_name_is_a_model_or_a_whole_key():
    exact = measured(str(key("m", 2)), process_gib=5.0)
    traits = KnownTraits({"m": measured("m"), exact.name: exact})
    assert traits.sensitivity(key("m", 2)).demand.mem_gib == 5.0
    assert traits.sensitivity(key("m", 1)).demand.mem_gib == 0.0
    assert traits.sensitivity(key("other")) is None
    assert traits.is_measured(key("m", 4))
    assert not traits.is_measured(key("other"))


def test_what_cannot_be_read_or_be_true_costs_only_itself(tmp_path, caplog):
    good = measured().to_document()
    wrong = {"a": {"process_gib": "much"}, "b": {"points": [{"cpus": "two", "throughput": 1.0}]}, "c": {"points": 3}}
    wrong["d"] = {"saturating_cpus": float("inf")}
    side = {"key": asdict(key("m")), "solo_s": 1, "shared_s": 2, "ratio": 2, "spread": None, "confidence": 1}
    pair = {"a": {**side, "iterations": float("inf")}, "b": side, "rounds": 1, "measured_s": 1, "measured_at": ""}
    with ProfileStore(tmp_path / "p.db") as store:
        store.put_document(SENSITIVITIES, good)
        for name, change in wrong.items():
            store.put_document(SENSITIVITIES, Document(name, good.measured_at, {**good.body, **change}))
        store.put_document(PAIRS, Document("p", good.measured_at, pair))
        traits = read_traits(store)
    assert not traits.pairs
    assert [traits.sensitivity(key(name)) for name in wrong] == [None] * 4
    assert traits.sensitivity(key("hungry")) is not None
    assert "'c' cannot be read" in caplog.text
    absurd = measured(cpu=CpuSensitivity((), 4, 0, 2))
    assert KnownTraits({"hungry": absurd}).sensitivity(key("hungry")) is None
    assert "is not used" in caplog.text


def test_a_stage_profile_stands_in_and_never_asks_for_less_than_the_job():
    profile = StageProfile(key("m"), 0.1, 0.7, 0.1, 0.1, iteration_s=1.0, iterations=20)
    job = make_job(1, cpu_count=4, cpus_per_task=4, mem_per_node_mib=2048)
    nodes = NodeIndex((make_node("n1"),))
    derived = derived_for(job, profile, nodes)
    assert derived.throughput_at(8, 0) / derived.throughput_at(4, 0) == pytest.approx(1 / 0.65)
    assert derived.demand.cpus >= 4
    assert derived.demand.mem_gib == 2.0
    idle = StageProfile(key("m"), 0.1, 0.0, 0.8, 0.1, iteration_s=1.0, iterations=20)
    assert derived_for(job, idle, nodes).demand.cpus == 4
    assert derived_for(replace(job, job_id=2), profile, nodes) is derived


def test_nothing_is_derived_from_nothing_or_in_place_of_a_measurement():
    assert derived_for(make_job(1), None, NodeIndex((make_node("n1"),))) is None
    cycle = cycle_of([make_job(1, mem_per_node_mib=2048)], [make_node("n1")])
    profile = StageProfile(cycle.key_of(cycle.view.jobs[1]), 0.1, 0.7, 0.1, 0.1, iteration_s=1.0)
    known = Knowledge({profile.key: profile}, traits=KnownTraits({str(profile.key): measured()}))
    cycle = replace(cycle, knowledge=known)
    planned = plan_job(gather(cycle).known[1], "main", gather(cycle))
    assert planned.sensitivity == sensitivity_of(measured(), least_mem_gib=2.0)


def test_what_is_measured_of_a_users_own_model_comes_before_what_is_published():
    traits = KnownTraits({name: measured(name, process_gib=gib) for name, gib in (("m", 1.0), ("m of alice", 2.0))})
    own = {user: replace(key("m"), user=user) for user in ("alice", "bob")}
    assert traits.sensitivity(own["alice"]).demand.mem_gib == 2.0
    assert traits.sensitivity(own["bob"]).demand.mem_gib == 1.0
    assert not KnownTraits({"m of alice": measured("m of alice")}).is_measured(own["bob"])


def test_a_batch_model_rests_on_ones_own_and_published_profiles():
    def of(user: str, batch_size: int, iteration_s: float) -> StageProfile:
        return StageProfile(ProfileKey("m", batch_size, 1, "gpu", user), 0, 0, iteration_s, 0, iteration_s)

    stored = (of("", 2, 1.0), of("", 4, 2.0), of("alice", 4, 3.0), of("bob", 2, 9.0), of("bob", 8, 9.0))
    profiles = {each.key: each for each in stored}
    alices, all_users = (batch_model(ProfileKey("m", 4, 1, "gpu", user), profiles, {}, 1) for user in ("alice", ""))
    assert alices.compute_per_sample_s == pytest.approx(0.7)  # through 2 × 1 s and 4 × 3 s, with nothing fixed
    assert all_users.compute_per_sample_s == pytest.approx(0.5)


def test_a_batch_model_hides_communicating_as_far_as_the_profile_shows():
    """Two GPUs: of 0.4 s on the network 0.3 s go on behind computing."""
    stored = [
        StageProfile(
            ProfileKey("m", batch_size, 2, "gpu"), 0, 0, compute_s, 0.1, compute_s + 0.1,
            detail=ProfileDetail(busy_s=(0, 0, compute_s, network_s)),
        )
        for batch_size, compute_s, network_s in ((4, 0.5, 0.4), (8, 0.9, 0.1))
    ]  # fmt: skip
    known = {each.key: each for each in stored}
    hidden, open_ = (batch_model(each.key, known, {}, 4) for each in stored)
    assert hidden.communicate_s == 0.4
    assert hidden.overlap_exponent > 1
    assert (open_.communicate_s, open_.overlap_exponent) == (0.1, 1.0)
    # What is measured comes out again, and only the last of two parts hides it (Eq. 7).
    assert [hidden.iteration_s(), open_.iteration_s()] == pytest.approx([0.6, 1.0])
    half_s, delta = 0.1 + 0.1 * 2, hidden.overlap_exponent
    assert hidden.iteration_s(2) == pytest.approx(half_s + (half_s**delta + 0.4**delta) ** (1 / delta))
    assert batch_model(stored[0].key, known | {stored[0].key: replace(stored[0], synchronize_s=0.0, iteration_s=0.5)},
                       {}, 1).overlap_exponent == float("inf")  # fmt: skip


def test_a_table_of_pairs_tells_users_apart():
    def of(user: str, model: str) -> StageProfile:
        return StageProfile(ProfileKey(model, 8, 1, "gpu", user), 0, 0, 1, 0, 1)

    stored = {each.key: each for each in (of("alice", "a"), of("bob", "a"), of("bob", "b"), of("", "b"))}
    keys = [ProfileKey(model, 8, 1, "gpu", user) for model, user in (("a", "bob"), ("b", ""))]
    table = interference_table(stored, stored, stored, KnownTraits(pairs=(measured_pair(*keys, 1.5, 1.5),)))
    for published_or_his in ("b", "b of bob"):
        assert table.speeds("a of bob", published_or_his) == pytest.approx((1 / 1.5, 1 / 1.5))
    assert table.speeds("a of alice", "b") == pytest.approx((0.5, 0.5))  # bob's measurement says nothing of hers
    assert table.speeds("a of alice", "a of bob") is None  # they never share
