"""`muri simulate --model live`: the controller itself on a virtual cluster."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from engine_builders import CPU, GPU, NETWORK, STORAGE, by_id, job, run

from muri.policies.options import OptionsError
from muri.simulator.model import Cluster, Outage, SimulationError
from muri.slurm_plugin.config import ConfigError
from muri_lab.sweep.command import sweep

KINDS = (STORAGE, CPU, GPU, NETWORK)
ONE_GPU = Cluster(1, 1)


def four(service_s=400.0):
    return [job(number, number, service_s, KINDS[number], name=f"m{number}") for number in range(4)]


def test_jobs_that_need_different_resources_share_a_gpu():
    alone = run(four(), "muri-s", ONE_GPU, model="live", interval_s=60.0, options={"max_group_size": 1})
    shared = run(four(), "muri-s", ONE_GPU, model="live", interval_s=60.0)
    assert max(record.end_s for record in alone.records) > 1600
    assert max(record.end_s for record in shared.records) < 900
    assert sum(record.shared_s > 0 for record in shared.records) >= 2


@pytest.mark.parametrize(("promise", "takes_s"), [(0.5, 800), (0.7, 400), (0.9, 400)])
def test_no_job_takes_longer_than_it_was_promised(promise, takes_s):
    """All four together get half of their speed; of pairs the planner expects less than 0.9."""
    kinds = ((0.0, 0.25, 0.75, 0.0), (0.0, 0.75, 0.25, 0.0))
    jobs = [job(number, number, 400.0, kinds[number % 2], name=f"m{number}", cpu_count=1) for number in range(4)]
    one_cpu = replace(ONE_GPU, cpus_per_node=1)
    records = run(jobs, "muri-s", one_cpu, model="live", interval_s=60.0, options={"min_speed": promise}).records
    assert all(0.98 < (record.end_s - record.start_s) / takes_s < 1.02 for record in records)
    starts = {round(record.start_s / 60) for record in records}
    assert len(starts) == {0.5: 1, 0.7: 2, 0.9: 4}[promise]


@pytest.mark.parametrize(("classes", "shares"), [((False, True), True), ((True, False), True), ((False, False), False)])
def test_under_antman_a_job_joins_one_of_the_other_class(classes, shares):
    jobs = [
        job(number, 100.0 * number, 400.0, KINDS[number], name=f"m{number}", opportunistic=opportunistic)
        for number, opportunistic in enumerate(classes)
    ]
    first, second = run(jobs, "antman", ONE_GPU, model="live", interval_s=60.0).records
    assert (second.start_s < first.end_s) is shares
    assert first.restarts == second.restarts == 0


def test_the_same_trace_gives_the_same_result():
    first, second = (run(four(), "muri-jct", Cluster(1, 2), model="live", with_spans=True) for _ in range(2))
    assert (first.records, first.samples, first.spans) == (second.records, second.samples, second.spans)


def test_a_cycle_follows_every_interval():
    result = run([job(1, 10, 100)], "muri-s", ONE_GPU, model="live", interval_s=300.0)
    assert 300 < by_id(result)[1].start_s < 303


def test_cycles_on_events_follow_an_arrival_and_an_end_within_seconds():
    jobs = [job(1, 10, 100), job(2, 20, 100)]
    options = {"on_events": True, "max_group_size": 1}
    records = by_id(run(jobs, "muri-s", ONE_GPU, model="live", interval_s=300.0, options=options))
    assert 10 < records[1].start_s < 15
    assert 0 < records[2].start_s - records[1].end_s < 10


def test_models_without_a_profile_are_measured_first():
    cold = run(four(), "muri-s", ONE_GPU, model="live", interval_s=60.0, profiling_s=30.0)
    warm = run(four(), "muri-s", ONE_GPU, model="live", interval_s=60.0)
    assert min(record.start_s for record in cold.records) > min(record.start_s for record in warm.records)
    assert len(cold.records) == 4


def test_jobs_on_several_nodes_run():
    wide = job(1, 0, 100, gpu_count=4)
    assert by_id(run([wide], "muri-s", Cluster(2, 2), model="live", interval_s=60.0))[1].end_s < 200


def test_a_node_that_fails_sends_its_job_back():
    outage = Outage(0, 100.0, 200.0)
    result = run([job(1, 0, 300)], "muri-s", ONE_GPU, model="live", interval_s=60.0, outages=(outage,))
    record = by_id(result)[1]
    assert record.restarts == 1
    assert record.end_s > 500


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"profile_noise": 0.2}, SimulationError, "--profile-noise is for --model default"),
        ({"options": {"color": 3}}, OptionsError, "unknown option 'color'"),
        ({"options": {"max_group_size": 9}}, SimulationError, "muri.yaml would refuse that"),
    ],
)
def test_what_has_no_meaning_live_is_refused(how, error, words):
    with pytest.raises(error, match=words):
        run(four(), "muri-s", ONE_GPU, model="live", **how)


def test_a_job_too_large_for_the_cluster_is_named():
    with pytest.raises(SimulationError, match="job 7 asks for 3 GPUs"):
        run([job(7, 0, 60, gpu_count=3)], "muri-s", Cluster(2, 2), model="live")


def test_a_policy_that_cannot_run_slurm_is_refused():
    with pytest.raises(ConfigError, match="comparisons"):
        run(four(), "pollux", ONE_GPU, model="live")


def test_the_command_prints_its_table(tmp_path):
    trace = tmp_path / "t.csv"
    rows = ["job_id,user,submit_s,gpu_count,iterations,model,batch_size,iteration_s,load_s,preprocess_s,propagate_s,"
            "synchronize_s,gpu_mem_gib"]  # fmt: skip
    rows += [f"{n},u,{n},1,300,m{n},8,1,{0.1 * n},0.2,0.3,0.1,1" for n in range(4)]
    trace.write_text("\n".join(rows) + "\n")
    asked = [str(trace), "--policy", "muri-s,muri-jct", "--model", "live", "--nodes", "1",
             "--gpus-per-node", "2", "--json", "--out", str(tmp_path / "report")]  # fmt: skip
    done = CliRunner().invoke(sweep, asked)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert set(told["policies"]) == {"muri-s", "muri-jct"}
    assert (tmp_path / "report" / "report.html").exists()
