"""Synergy's reference model: its rules by hand on small rounds, and the published results."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from muri.policies.allocation.names import SYNERGY_NAMES, SynergyName, parse_name
from muri.profiler.records import StageProfile
from muri.simulator.cli.simulate_command import simulate as simulate_command
from muri.simulator.model import Cluster, Settings, SimulationError, SimulationResult, Trace, TraceJob
from muri.simulator.run import simulate
from muri.simulator.sweep.metrics import metrics_of
from muri.simulator.synergy_reference.mechanisms import MECHANISMS, Round
from muri.simulator.synergy_reference.run import (
    KEYS,
    SYNERGY_REFERENCE_POLICIES,
    URGENT_AFTER_S,
    in_order,
    run_rounds,
)
from muri.simulator.synergy_reference.state import JobTable, Ledger, Share, job_table
from muri.simulator.traces.models import synergy_models
from muri.simulator.traces.read import read_trace

SHARED = Path(__file__).parents[4] / "shared"
PUBLISHED = SHARED / "reference" / "results_synergy.csv"
PUBLIC_TRACE = SHARED / "traces" / "synergy_single_gpu_load9.csv"

NODE = {"cpus_per_node": 24.0, "mem_gib_per_node": 500.0}
ONE = Cluster(1, 8, **NODE)
TWO = Cluster(2, 8, **NODE)
FAIR = Share(3.0, 62.5)
REFERENCE = Settings(model="reference")


def job(job_id: int, model: str, gpus: int = 1, iterations: int = 10_000, submit_s: float = 0.0) -> TraceJob:
    return TraceJob(job_id, submit_s, gpus, iterations, synergy_models()[model].profile(gpus))


def jobs_of(*models: str) -> Trace:
    """One-GPU jobs, or `model:gpus`; all there from the start."""
    parts = [model.partition(":") for model in models]
    return Trace("small", tuple(job(index, name, int(gpus or 1)) for index, (name, _, gpus) in enumerate(parts)))


def table_of(models: Sequence[str], cluster: Cluster) -> JobTable:
    return job_table(jobs_of(*models), cluster, by_demand=True)


def round_of(mechanism: str, models: Sequence[str], cluster: Cluster = ONE) -> Round:
    rows = np.arange(len(models))
    return MECHANISMS[mechanism](table_of(models, cluster), cluster, rows)


def speeds_of(mechanism: str, models: Sequence[str], cluster: Cluster = ONE) -> dict[int, float]:
    """Speed by row of those that run."""
    found = round_of(mechanism, models, cluster)
    return dict(zip(found.rows.tolist(), found.speeds.tolist(), strict=True))


def simulated(trace: Trace, policy: str, cluster: Cluster = ONE, settings: Settings = REFERENCE) -> SimulationResult:
    return simulate(trace, policy, cluster, settings)


# Demands


def test_a_demand_within_a_node_is_the_models_own() -> None:
    kind = table_of(["alexnet:2"], ONE).kinds[0]
    assert (kind.demand, kind.speed) == (Share(12.0, 125.0), 2.94)


def test_a_demand_above_a_node_is_clipped_and_the_speed_falls_in_a_straight_line() -> None:
    """Six mobilenet GPUs ask for 36 CPUs: 24 are 6 of the 18 that lie above the fair 18."""
    kind = table_of(["mobilenet:6"], ONE).kinds[0]
    assert kind.demand == Share(4.0, 62.5)
    assert kind.speed == pytest.approx(1 + 0.55 * 6 / 18)


def test_memory_above_a_node_is_clipped_without_loss_while_the_cpus_are_there() -> None:
    """Four m5 GPUs ask for 24 CPUs and 750 GiB; the public code looks at the CPUs alone."""
    kind = table_of(["m5:4"], ONE).kinds[0]
    assert (kind.demand, kind.speed) == (Share(6.0, 125.0), 2.5)


def test_on_a_node_with_more_cpus_the_fair_share_is_faster_and_the_demand_gains_less() -> None:
    # alexnet gains 1.25 from the fourth CPU, and 2.94 with its demand: 2.352 remains, as in the authors' table for 4.
    four = Cluster(1, 8, cpus_per_node=32.0, mem_gib_per_node=500.0)
    usual, faster = table_of(["alexnet", "gnmt"], ONE), table_of(["alexnet", "gnmt"], four)
    assert faster.speed.tolist() == pytest.approx([2.352, 1.0])
    assert (usual.iteration_s / faster.iteration_s).tolist() == pytest.approx([1.25, 1.0])


def test_a_whole_node_has_the_fair_share() -> None:
    kind = table_of(["alexnet:8"], ONE).kinds[0]
    assert (kind.demand, kind.speed) == (FAIR, 1.0)


def test_more_gpus_than_a_node_has_get_the_fair_share_of_what_exceeds_one() -> None:
    alexnet, text = table_of(["alexnet:16", "gnmt:16"], TWO).kinds
    assert (alexnet.demand, alexnet.speed) == (FAIR, 1.0)
    assert (text.demand, text.speed) == (Share(1.0, 20.0), 1.0)


# Mechanisms


def test_proportional_fills_node_after_node() -> None:
    table = job_table(jobs_of(*["alexnet"] * 20), TWO, by_demand=False)
    found = MECHANISMS["proportional"](table, TWO, np.arange(20))
    assert found.rows.tolist() == list(range(16))
    assert found.first_nodes.tolist() == [0] * 8 + [1] * 8
    assert set(found.speeds.tolist()) == {1.0}


def test_smaller_jobs_fill_what_a_larger_one_leaves() -> None:
    assert list(speeds_of("proportional", ["gnmt:6", "gnmt:4", "gnmt:2", "gnmt"])) == [0, 2]


def test_greedy_skips_what_does_not_fit_and_goes_on() -> None:
    """18 CPUs are taken by two; the third of the same kind fails, the text model fits."""
    assert speeds_of("greedy", ["res18", "res18", "res18", "gnmt"]) == {0: 2.4, 1: 2.4, 3: 1.0}


def test_greedy_gives_gpus_of_one_job_one_by_one() -> None:
    """Three alexnet GPUs: two fill the first node's 24 CPUs, the third goes to the next."""
    found = round_of("greedy", ["alexnet:2", "alexnet", "res18:2"], TWO)
    assert found.rows.tolist() == [0, 1]
    assert found.first_nodes.tolist() == [0, 1]
    assert found.nodes is not None
    assert found.nodes.cpus == [0.0, 12.0]


def test_tune_reverts_a_job_to_its_fair_share_where_its_demand_does_not_fit() -> None:
    """12 and 9 CPUs leave the fair 3, but not mobilenet's 6."""
    assert speeds_of("tune", ["alexnet", "res18", "mobilenet"]) == {0: 2.94, 1: 2.4, 2: 1.0}


def test_tune_resets_one_victim_where_that_is_enough() -> None:
    """Both alexnets have all CPUs; the first one's surplus of 9 is more than the one that is missing."""
    assert speeds_of("tune", ["alexnet", "alexnet", "gnmt"]) == {0: 1.0, 1: 2.94, 2: 1.0}


def test_tune_does_not_try_the_demand_again_after_a_reset() -> None:
    """9 CPUs come free, enough for res18's demand, but it has been reverted before."""
    found = round_of("tune", ["alexnet", "alexnet", "res18"])
    assert found.speeds.tolist() == [1.0, 2.94, 1.0]
    assert found.nodes is not None
    assert found.nodes.cpus == [24.0 - 12.0 - 3.0 - 3.0]


def test_tunes_victims_have_most_cpus_for_each_gpu_then_most_memory() -> None:
    """res18 has 9 CPUs; m5 and mobilenet 6 each, of which m5 has more memory. One text job needs one of them."""
    models = ["mobilenet", "m5", "res18", "res50:1"]  # 25 CPUs: res50 is cut to 3, which leaves none
    assert speeds_of("tune", models) == {0: 1.55, 1: 2.5, 2: 2.4, 3: 1.0}
    assert speeds_of("tune", [*models, "gnmt"])[2] == 1.0
    assert speeds_of("tune", ["mobilenet", "mobilenet", "m5", "mobilenet", "gnmt"])[2] == 1.0


def test_tunes_victims_of_one_node_come_before_those_of_several() -> None:
    """Row 1 has GPUs of both nodes and as many CPUs for each as row 2."""
    models = ["alexnet", "alexnet:2", "alexnet", "gnmt"]
    speeds = speeds_of("tune", models, TWO)
    assert speeds == {0: 1.0, 1: 2.94, 2: 2.94, 3: 1.0}


def test_tune_makes_room_on_the_node_with_fewest_free_gpus() -> None:
    """Both nodes are out of CPUs; the second one has 5 GPUs free, the first 6."""
    models = ["alexnet", "alexnet", "alexnet", "res18", "res50"]  # res50 is cut to the last 3 CPUs of node 1
    found = round_of("tune", [*models, "gnmt"], TWO)
    assert found.first_nodes.tolist() == [0, 0, 1, 1, 1, 1]
    assert found.speeds.tolist() == [2.94, 2.94, 1.0, 2.4, 1.0, 1.0]


def test_tune_leaves_a_victim_without_surplus_as_it_is() -> None:
    """Text models ask for less than their share and are never raised to it."""
    found = round_of("tune", ["gnmt", "alexnet", "alexnet"])
    assert found.speeds.tolist() == [1.0, 2.94, 1.0]
    assert found.nodes is not None
    assert found.nodes.cpus == [24.0 - 1.0 - 12.0 - 3.0]


@pytest.mark.parametrize("count", [40, 200])
def test_tune_uses_every_gpu_and_slows_nobody_below_the_fair_share(count: int) -> None:
    models = [f"{name}:{gpus}" for name in synergy_models() for gpus in (1, 2, 4, 3)]
    shuffled = [models[index] for index in np.random.default_rng(count).integers(len(models), size=count)]
    found = round_of("tune", shuffled, Cluster(4, 8, **NODE))
    assert min(found.speeds) >= 1.0
    assert table_of(shuffled, TWO).gpus[found.rows].sum() == 32


# Orders


def ledger_of(*jobs: TraceJob) -> Ledger:
    return Ledger(job_table(Trace("small", jobs), ONE, by_demand=True))


def ordered(order: str, ledger: Ledger, now_s: float) -> list[int]:
    return in_order(KEYS[order], ledger, np.arange(len(ledger.table.jobs)), now_s).tolist()


def test_srtf_counts_the_speed_of_the_last_round() -> None:
    """Alone alexnet needs 600 s with its demand and 1,764 s with its fair share; the text job 1,200 s."""
    ledger = ledger_of(job(0, "gnmt", iterations=10_000), job(1, "alexnet", iterations=2_940))
    assert ordered("srtf", ledger, 0.0) == [1, 0]
    ledger.run_round(0.0, np.arange(2), np.array([1]), np.array([1.0]))  # 500 iterations: 1,464 s to go
    assert ordered("srtf", ledger, 300.0) == [0, 1]
    ledger.run_round(300.0, np.arange(2), np.array([0]), np.array([1.0]))  # the other one did not run: 498 s to go
    assert ordered("srtf", ledger, 600.0) == [1, 0]


def test_las_counts_seconds_times_gpus() -> None:
    ledger = ledger_of(job(0, "gnmt", gpus=4), job(1, "gnmt"), job(2, "gnmt"))
    ledger.run_round(0.0, np.arange(3), np.array([0, 1]), np.ones(2))
    ledger.run_round(300.0, np.arange(3), np.array([1]), np.ones(1))
    assert ordered("las", ledger, 600.0) == [2, 1, 0]


def test_ftf_puts_the_least_unfairly_treated_first() -> None:
    """Both have 1,200 s to go; the first one has waited 3,000 s more."""
    ledger = ledger_of(job(0, "gnmt"), job(1, "gnmt", submit_s=3_000.0))
    assert ordered("ftf", ledger, 3_000.0) == [1, 0]


@pytest.mark.parametrize("order", ["srtf", "las", "ftf"])
def test_who_has_not_run_for_a_thousand_hours_goes_first_from_the_next_round_on(order: str) -> None:
    ledger = ledger_of(
        job(0, "gnmt", iterations=10**9), job(1, "gnmt", iterations=10**8, submit_s=float(URGENT_AFTER_S))
    )
    ledger.rounds[0] = 1
    assert ordered(order, ledger, URGENT_AFTER_S) == [1, 0]  # just as long: not yet
    assert ordered(order, ledger, URGENT_AFTER_S + 300) == [1, 0]  # noticed now
    assert ordered(order, ledger, URGENT_AFTER_S + 600) == [0, 1]


def test_first_in_first_out_knows_no_urgency() -> None:
    ledger = ledger_of(job(0, "gnmt"), job(1, "gnmt"))
    ledger.urgent[1] = True
    assert ordered("fifo", ledger, URGENT_AFTER_S * 2.0) == [0, 1]


# Rounds


def rounds_of(policy: str, trace: Trace, cluster: Cluster = ONE) -> list[tuple[float, list[int]]]:
    """Time and job ids of each round, in the order in which GPUs were given out."""
    name = parse_name(policy)
    assert isinstance(name, SynergyName)
    ledger = Ledger(job_table(trace, cluster, by_demand=name.mechanism != "proportional"))
    seen: list[tuple[float, list[int]]] = []
    jobs = ledger.table.jobs
    run_rounds(
        ledger,
        name,
        cluster,
        lambda now_s, _, found: seen.append((now_s, [jobs[row].job_id for row in found.rows])),
        len(jobs),
    )
    return seen


def test_las_with_tune_starts_with_the_largest() -> None:
    trace = jobs_of("gnmt", "gnmt:4", "gnmt:2")
    assert rounds_of("synergy-tune-las", trace)[0] == (0.0, [1, 2, 0])
    assert rounds_of("synergy-greedy-las", trace)[0] == (0.0, [0, 1, 2])


def test_las_chooses_who_may_run_before_anything_is_shared_out() -> None:
    """The eight first have the GPUs; six of them find no CPUs, which the ninth can't use."""
    trace = jobs_of(*["res18"] * 8, "gnmt")
    assert rounds_of("synergy-greedy-las", trace)[0][1] == [0, 1]
    assert rounds_of("synergy-greedy-fifo", trace)[0][1] == [0, 1, 8]


def test_jobs_start_and_end_on_the_boundaries_of_rounds() -> None:
    """2,500 iterations of 0.12 s fit a round; one more takes another. An arrival comes before a plan at its time."""
    trace = Trace(
        "small", (job(0, "gnmt", iterations=2_501, submit_s=1.0), job(1, "gnmt", iterations=1, submit_s=300.0))
    )
    records = simulated(trace, "synergy-tune-fifo").records
    assert [(record.start_s, record.end_s, record.run_s) for record in records] == [(300, 900, 600), (300, 600, 300)]


def test_an_unfinished_iteration_is_lost_at_the_end_of_a_round() -> None:
    """alexnet: ⌊300 / (0.6 / 2.94)⌋ = 1,470 with the demand, 500 with the fair share."""
    trace = Trace("small", (job(0, "alexnet", iterations=2_940),))
    assert simulated(trace, "synergy-tune-fifo").records[0].end_s == 600
    assert simulated(trace, "synergy-proportional-fifo").records[0].end_s == 1_800


def test_a_time_without_jobs_is_skipped() -> None:
    trace = Trace("small", (job(0, "gnmt", iterations=1), job(1, "gnmt", iterations=1, submit_s=10_000.0)))
    assert [now_s for now_s, _ in rounds_of("synergy-tune-fifo", trace)] == [0.0, 10_200.0]


def test_stops_are_counted() -> None:
    """SRTF stops the long job for a shorter one that needs all GPUs."""
    long, short = job(0, "gnmt", 8, iterations=5_000), job(1, "gnmt", 8, iterations=2_000, submit_s=200.0)
    first, second = simulated(Trace("small", (long, short)), "synergy-tune-srtf").records
    assert (first.restarts, first.run_s, first.end_s) == (1, 600, 900)
    assert (second.restarts, second.run_s, second.end_s) == (0, 300, 600)


# Whole simulations


def busy_trace(count: int = 120) -> Trace:
    """More than two nodes can do at once, of all models and sizes."""
    models, sizes = sorted(synergy_models()), (1, 2, 1, 4, 8, 1, 3, 16)
    jobs = tuple(
        job(index, models[index % 12], sizes[index % 8], iterations=500 + 997 * (index % 13), submit_s=41.0 * index)
        for index in range(count)
    )
    return Trace("busy", jobs)


@pytest.mark.parametrize("policy", [name for name in SYNERGY_REFERENCE_POLICIES if name in SYNERGY_NAMES])
def test_work_is_conserved(policy: str) -> None:
    """Every round is checked as well (conftest.py): GPUs, CPUs and memory of each node, nobody before his time."""
    trace = busy_trace()
    result = simulated(trace, policy, TWO)
    assert len(result.records) == len(trace.jobs)
    for record in result.records:
        fastest = 2.94 if "proportional" not in policy else 1.0
        assert record.run_s * fastest >= record.job.service_s
        assert record.end_s - record.start_s >= record.run_s
    held_s = sum(record.run_s * record.job.gpu_count for record in result.records)
    assert sum(sample.length_s * sample.gpus_held for sample in result.samples) == pytest.approx(held_s)
    assert all(0 <= share <= 1 for sample in result.samples for share in sample.utilization)


@pytest.mark.parametrize("policy", ["synergy-tune-srtf", "synergy-greedy-fifo"])
def test_the_figures_of_the_first_jobs_are_the_same_when_it_stops_behind_them(policy: str) -> None:
    trace = busy_trace()
    whole = simulated(trace, policy, TWO)
    short = simulated(trace, policy, TWO, replace(REFERENCE, until=60))
    assert short.unfinished
    assert {job.job_id for job in short.unfinished} | {one.job.job_id for one in short.records} == set(range(120))
    assert short.records[:60] == whole.records[:60]
    ours, theirs = (metrics_of(result, 20, 60) for result in (short, whole))
    assert ours.finish_time_fairness_mean == pytest.approx(theirs.finish_time_fairness_mean)
    assert replace(ours, wall_s=0, decisions=0, decision_mean_s=0, decision_p99_s=0) == replace(
        theirs, wall_s=0, decisions=0, decision_mean_s=0, decision_p99_s=0
    )


def test_stays_are_told_when_asked_for() -> None:
    result = simulate(busy_trace(), "synergy-tune-srtf", TWO, REFERENCE, with_spans=True)
    stays: dict[int, float] = {}
    for span in result.spans:
        stays[span.members[0]] = stays.get(span.members[0], 0.0) + span.end_s - span.start_s
    assert stays == {record.job.job_id: record.run_s for record in result.records}


def test_the_short_name_is_the_same_policy() -> None:
    assert (
        simulated(busy_trace(), "synergy-tune", TWO).records
        == simulated(busy_trace(), "synergy-tune-fifo", TWO).records
    )


# What is published


@lru_cache
def published() -> dict[str, dict[str, float]]:
    with PUBLISHED.open() as file:
        rows = list(csv.DictReader(file))
    return {
        f"synergy-{row['mechanism']}-{row['policy'].lower()}": {key: float(row[key]) for key in list(row)[2:5]}
        for row in rows
    }


@pytest.mark.skipif(not (PUBLISHED.exists() and PUBLIC_TRACE.exists()), reason=f"no published results at {PUBLISHED}")
def test_published_to_the_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the six, the fastest one of TUNE; benchmarks/synergy_reference.py has all."""
    monkeypatch.setenv("MURI_SIMULATOR_CHECKS", "0")
    cluster = Cluster(16, 8, **NODE)
    result = simulated(read_trace(PUBLIC_TRACE), "synergy-tune-fifo", cluster, replace(REFERENCE, until=5_000))
    jct_h = np.array([record.jct_s for record in result.records[4_000:5_000]]) / 3_600
    ours = {"avg_jct_h": jct_h.mean(), "p50_jct_h": np.median(jct_h), "p99_jct_h": np.percentile(jct_h, 99)}
    assert ours == pytest.approx(published()["synergy-tune-fifo"], rel=1e-9)


# Refusals


def refusal(*arguments: str) -> str:
    done = CliRunner().invoke(simulate_command, [*arguments])
    assert done.exit_code != 0
    return str(done.exception)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("synergy-tune-sjf", "valid are: srtf, srsf"),
        ("synergy-tune-sjf", "synergy-proportional-fifo"),
        ("synergy-opt-fifo", "integer program"),
        ("synergy-opt-fifo", "synergy-tune-fifo"),
    ],
)
def test_a_policy_that_it_does_not_know_is_refused_with_those_it_does(policy: str, said: str) -> None:
    assert said in refusal("jobs.csv", "--model", "reference", "--policy", policy)


def test_an_option_is_refused() -> None:
    said = refusal("a.csv", "--model", "reference", "--policy", "synergy-tune", "--option", "max_group_size=2")
    assert "'max_group_size'; it has none" in said


@pytest.mark.parametrize(
    ("cluster", "option"),
    [(Cluster(1, 8, mem_gib_per_node=500), "--cpus-per-node"), (Cluster(1, 8, cpus_per_node=24), "--mem-gb-per-node")],
)
def test_a_cluster_without_figures_is_refused(cluster: Cluster, option: str) -> None:
    with pytest.raises(SimulationError, match=f"say {option}"):
        simulated(jobs_of("gnmt"), "synergy-tune-fifo", cluster)


def of_profile(profile: StageProfile) -> Trace:
    return Trace("small", (TraceJob(7, 0.0, 1, 10, profile),))


def test_another_systems_model_is_refused() -> None:
    profile = job(0, "gnmt").profile
    with pytest.raises(SimulationError, match=r"job 7.*'vgg19'.*alexnet, bert"):
        simulated(of_profile(replace(profile, key=replace(profile.key, model="vgg19"))), "synergy-tune-fifo")


def test_an_iteration_longer_than_a_round_is_refused() -> None:
    profile = replace(job(0, "gnmt").profile, iteration_s=301.0, propagate_s=300.0)
    with pytest.raises(SimulationError, match=r"job 7.*301.0 s.*300 s"):
        simulated(of_profile(profile), "synergy-tune-fifo")


@pytest.mark.parametrize("setting", ["interval_s", "profiling_s", "profile_noise"])
def test_a_setting_that_it_does_not_have_is_refused(setting: str) -> None:
    with pytest.raises(SimulationError, match=f"no {setting}"):
        simulated(jobs_of("gnmt"), "synergy-tune-fifo", settings=replace(REFERENCE, **{setting: 0.5}))


def test_every_name_is_a_mechanism_and_an_order() -> None:
    assert len(SYNERGY_NAMES) == 16
    assert all(str(parse_name(name)) == name for name in SYNERGY_NAMES)
    assert parse_name("synergy-tune") == SynergyName("tune", "fifo")
    assert parse_name("tune-fifo") is None
