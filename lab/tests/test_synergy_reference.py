"""Synergy's reference model: its rules by hand on small rounds, and the published results."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from muri.policies.options import MECHANISMS as NAMES
from muri.policies.options import ORDERS
from muri.profiler.records import StageProfile
from muri.simulator.metrics import metrics_of
from muri.simulator.model import Cluster, Settings, SimulationError, SimulationResult, Trace, TraceJob
from muri.simulator.run import simulate
from muri.simulator.traces.models import synergy_models
from muri.simulator.traces.read import read_trace
from muri_lab.synergy_reference.mechanisms import MECHANISMS, Round
from muri_lab.synergy_reference.run import KEYS, URGENT_AFTER_S, in_order
from muri_lab.synergy_reference.state import JobTable, Ledger, Share, job_table

SHARED = Path(__file__).parents[3] / "shared"
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


def simulated(
    trace: Trace, way: str = "tune-fifo", cluster: Cluster = ONE, settings: Settings = REFERENCE
) -> SimulationResult:
    """Simulate a mechanism and an order."""
    mechanism, _, order = way.partition("-")
    return simulate(trace, "synergy", cluster, settings, {"mechanism": mechanism, "order": order})


# Demands


def test_a_demand_within_a_node_is_the_models_own() -> None:
    kind = table_of(["alexnet:2"], ONE).kinds[0]
    assert (kind.demand, kind.speed) == (Share(12.0, 125.0), 2.94)


def test_a_demand_above_a_node_is_clipped_and_the_speed_falls_in_a_straight_line() -> None:
    """Six mobilenet GPUs ask for 36 CPUs: 24 are 6 of the 18 that lie above the fair 18."""
    kind = table_of(["mobilenet:6"], ONE).kinds[0]
    assert kind.demand == Share(4.0, 62.5)
    assert kind.speed == pytest.approx(1 + 0.55 * 6 / 18)


# Mechanisms


def test_greedy_skips_what_does_not_fit_and_goes_on() -> None:
    """18 CPUs are taken by two; the third of the same kind fails, the text model fits."""
    assert speeds_of("greedy", ["res18", "res18", "res18", "gnmt"]) == {0: 2.4, 1: 2.4, 3: 1.0}


def test_tune_reverts_a_job_to_its_fair_share_where_its_demand_does_not_fit() -> None:
    """12 and 9 CPUs leave the fair 3, but not mobilenet's 6."""
    assert speeds_of("tune", ["alexnet", "res18", "mobilenet"]) == {0: 2.94, 1: 2.4, 2: 1.0}


def test_tunes_victims_have_most_cpus_for_each_gpu_then_most_memory() -> None:
    """res18 has 9 CPUs; m5 and mobilenet 6 each, of which m5 has more memory. One text job needs one of them."""
    models = ["mobilenet", "m5", "res18", "res50:1"]  # 25 CPUs: res50 is cut to 3, which leaves none
    assert speeds_of("tune", models) == {0: 1.55, 1: 2.5, 2: 2.4, 3: 1.0}
    assert speeds_of("tune", [*models, "gnmt"])[2] == 1.0
    assert speeds_of("tune", ["mobilenet", "mobilenet", "m5", "mobilenet", "gnmt"])[2] == 1.0


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


# Rounds


def test_jobs_start_and_end_on_the_boundaries_of_rounds() -> None:
    """2,500 iterations of 0.12 s fit a round; one more takes another. An arrival comes before a plan at its time."""
    trace = Trace(
        "small", (job(0, "gnmt", iterations=2_501, submit_s=1.0), job(1, "gnmt", iterations=1, submit_s=300.0))
    )
    records = simulated(trace, "tune-fifo").records
    assert [(record.start_s, record.end_s, record.run_s) for record in records] == [(300, 900, 600), (300, 600, 300)]


def test_an_unfinished_iteration_is_lost_at_the_end_of_a_round() -> None:
    """alexnet: ⌊300 / (0.6 / 2.94)⌋ = 1,470 with the demand, 500 with the fair share."""
    trace = Trace("small", (job(0, "alexnet", iterations=2_940),))
    assert simulated(trace, "tune-fifo").records[0].end_s == 600
    assert simulated(trace, "proportional-fifo").records[0].end_s == 1_800


def test_stops_are_counted() -> None:
    """SRTF stops the long job for a shorter one that needs all GPUs."""
    long, short = job(0, "gnmt", 8, iterations=5_000), job(1, "gnmt", 8, iterations=2_000, submit_s=200.0)
    first, second = simulated(Trace("small", (long, short)), "tune-srtf").records
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


@pytest.mark.parametrize("way", [f"{name}-{order}" for name in NAMES for order in ORDERS])
def test_work_is_conserved(way: str) -> None:
    """Every round is checked as well (conftest.py): GPUs, CPUs and memory of each node, no job before its time."""
    trace = busy_trace()
    result = simulated(trace, way, TWO)
    assert len(result.records) == len(trace.jobs)
    for record in result.records:
        fastest = 2.94 if "proportional" not in way else 1.0
        assert record.run_s * fastest >= record.job.service_s
        assert record.end_s - record.start_s >= record.run_s
    held_s = sum(record.run_s * record.job.gpu_count for record in result.records)
    assert sum(sample.length_s * sample.gpus_held for sample in result.samples) == pytest.approx(held_s)
    assert all(0 <= share <= 1 for sample in result.samples for share in sample.utilization)


@pytest.mark.parametrize("way", ["tune-srtf", "greedy-fifo"])
def test_the_figures_of_the_first_jobs_are_the_same_when_it_stops_behind_them(way: str) -> None:
    trace = busy_trace()
    whole = simulated(trace, way, TWO)
    short = simulated(trace, way, TWO, replace(REFERENCE, until=60))
    assert short.unfinished
    assert {job.job_id for job in short.unfinished} | {one.job.job_id for one in short.records} == set(range(120))
    assert short.records[:60] == whole.records[:60]
    ours, theirs = (metrics_of(result, 20, 60) for result in (short, whole))
    assert ours.finish_time_fairness_mean == pytest.approx(theirs.finish_time_fairness_mean)
    assert replace(ours, wall_s=0, decisions=0, decision_mean_s=0, decision_p99_s=0) == replace(
        theirs, wall_s=0, decisions=0, decision_mean_s=0, decision_p99_s=0
    )


# What is published


@lru_cache
def published() -> dict[str, dict[str, float]]:
    with PUBLISHED.open() as file:
        rows = list(csv.DictReader(file))
    return {
        f"{row['mechanism']}-{row['policy'].lower()}": {key: float(row[key]) for key in list(row)[2:5]} for row in rows
    }


@pytest.mark.skipif(not (PUBLISHED.exists() and PUBLIC_TRACE.exists()), reason=f"no published results at {PUBLISHED}")
def test_published_to_the_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the six, the fastest one of TUNE; lab/muri_lab/benchmarks/synergy_reference.py has all."""
    monkeypatch.setenv("MURI_SIMULATOR_CHECKS", "0")
    cluster = Cluster(16, 8, **NODE)
    result = simulated(read_trace(PUBLIC_TRACE), "tune-fifo", cluster, replace(REFERENCE, until=5_000))
    jct_h = np.array([record.jct_s for record in result.records[4_000:5_000]]) / 3_600
    ours = {"avg_jct_h": jct_h.mean(), "p50_jct_h": np.median(jct_h), "p99_jct_h": np.percentile(jct_h, 99)}
    assert ours == pytest.approx(published()["tune-fifo"], rel=1e-9)


# Refusals


@pytest.mark.parametrize(
    ("cluster", "option"),
    [(Cluster(1, 8, mem_gib_per_node=500), "--cpus-per-node"), (Cluster(1, 8, cpus_per_node=24), "--mem-gb-per-node")],
)
def test_a_cluster_without_figures_is_refused(cluster: Cluster, option: str) -> None:
    with pytest.raises(SimulationError, match=f"say {option}"):
        simulated(jobs_of("gnmt"), "tune-fifo", cluster)


def of_profile(profile: StageProfile) -> Trace:
    return Trace("small", (TraceJob(7, 0.0, 1, 10, profile),))


def test_another_systems_model_is_refused() -> None:
    profile = job(0, "gnmt").profile
    with pytest.raises(SimulationError, match=r"job 7.*'vgg19'.*alexnet, bert"):
        simulated(of_profile(replace(profile, key=replace(profile.key, model="vgg19"))), "tune-fifo")


def test_an_iteration_longer_than_a_round_is_refused() -> None:
    profile = replace(job(0, "gnmt").profile, iteration_s=301.0, propagate_s=300.0)
    with pytest.raises(SimulationError, match=r"job 7.*301.0 s.*300 s"):
        simulated(of_profile(profile), "tune-fifo")
