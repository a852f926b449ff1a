"""Models' sensitivity to CPUs, measured in the dry run that a new model gets under a policy that gives out CPUs."""

import os
from dataclasses import asdict, replace

import pytest
from fake_slurm import FakeSlurm, dry_runs, end_dry_run, make_job, make_node, one_gpu

from muri.profiler.dryrun.messages import Limits
from muri.profiler.records import ProfileKey
from muri.profiler.sensitivity import SENSITIVITIES, CpuSensitivity, Dataset, Point, SensitivityProfile
from muri.slurm_plugin.node import dry_run
from muri.slurm_plugin.node.dry_run import measure
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.comment_reports import MOST_BYTES, comment_with, sweep_figures, sweep_in

NEW = "muri:model=new,batch-size=8"
KEY = ProfileKey("new", 8, 1, "gpu", "alice")
CURVE = CpuSensitivity((Point(1, 1.0), Point(4, 3.9, 0.01), Point(5, 4.9, 0.02), Point(16, 5.0, 0.01)), 5, 0, 6)
STAGES = {"load_s": 0.1, "preprocess_s": 0.2, "propagate_s": 0.3, "synchronize_s": 0.0, "iteration_s": 0.6}

READS = {"items": 8000, "item_bytes": 2.0**20, "batch_items": 8.0, "bytes_per_s": 2.0**24, "workers": False}
"""8 GiB, of which an iteration reads 8 MiB in half a second."""

ITERATES = """\
#!/usr/bin/env python3
import os, time
cores, told = len(os.sched_getaffinity(0)), os.environ["SLURM_CPUS_ON_NODE"]
if result := os.environ.get("MURI_DRY_RUN_RESULT"):
    with open(result + ".new", "w") as stream:
        stream.write('{"load_s": %s, "propagate_s": %d}' % (told, cores))
    os.rename(result + ".new", result)
    time.sleep(600)
assert str(cores) == told == os.environ["MURI_CPUS"] == os.environ["OMP_NUM_THREADS"]
assert not os.listdir(os.environ["MURI_CHECKPOINT_DIR"])
open(os.environ["MURI_CHECKPOINT_DIR"] + "/saved", "w").close()
with open(os.environ["MURI_ITERATION_LOG"], "a") as stream:
    for number in range(1, 1000):  # as it goes on a machine that nothing else slows down
        stream.write(f"{number * 0.05 / cores}\\n")
time.sleep(600)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_script_runs_again_on_other_numbers_of_cpus(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "2")
    found = measure(ITERATES.encode(), [], Limits(time_limit_s=240), (1, 2))
    assert (found["load_s"], found["propagate_s"]) == (1, 1)  # its stages are those of the CPUs that it asked for
    cpu = sweep_in(found["cpus"], 2)
    assert [(point.cpus, round(point.throughput)) for point in cpu.points] == [(1, 20), (2, 40)]
    assert cpu.saturating_cpus == 2


@pytest.mark.parametrize(
    ("script", "steady_s", "why"),
    [
        ('[ -n "$MURI_DRY_RUN_RESULT" ] || exit 3', 3.0, "no throughput: the script failed with exit code 3"),
        ("", 1000.0, "no time is left"),
    ],
)
def test_a_script_that_cannot_be_swept_keeps_its_stages(monkeypatch, capsys, script, steady_s, why):
    monkeypatch.setattr(dry_run, "STEADY_S", steady_s)
    told = "$MURI_DRY_RUN_RESULT"
    text = f'#!/bin/sh\n{script}\necho \'{{"load_s": 1}}\' > "{told}.new"\nmv "{told}.new" "{told}"\n'
    assert measure(text.encode(), [], Limits(time_limit_s=240), (1, 2)) == {"load_s": 1}
    told = capsys.readouterr().err
    assert "was not measured" in told
    assert why in told


@pytest.mark.parametrize(("padding", "left"), [(300, {"cpus", "reads"}), (700, {"cpus"}), (800, set())])
def test_a_comment_without_room_loses_the_dataset_first_then_the_sweep_and_keeps_the_stages(padding, left):
    text = comment_with("x" * padding, "t1", {**STAGES, "cpus": sweep_figures(CURVE), "reads": READS})
    assert len(text) <= MOST_BYTES or not left
    told = tags.parse_json(tags.token(text, tags.PROFILE_PREFIX))
    assert {"cpus", "reads"} & set(told) == left
    assert "cpus" not in left or sweep_in(told["cpus"], 16) == CURVE
    assert told["iteration_s"] == 0.6


def dry_run_of(slurm, controller):
    """The dry run with the script of job 2: job 1 starts without waiting for any."""
    for _ in range(2):
        controller.cycle()
        slurm.tick()
    (run,) = dry_runs(slurm)
    return run


def site():
    """One GPU on which a job of the new model runs while another waits, and a spare node for dry runs."""
    spare = make_node("n9", partitions=("spare",), gpu_count=4)
    return FakeSlurm([make_job(number, admin_comment=NEW) for number in (1, 2)], [*one_gpu(), spare])


OPTIONS = {"policy": "synergy", "profiling": {"mode": "dry-run", "partition": "spare"}, "partitions": ("main",)}


def stored(store):
    return [SensitivityProfile.from_document(each) for each in store.documents(SENSITIVITIES)]


def planned_with(make_controller, reads=None, detail=None, cpus=None):
    """Slurm, once job 2 is planned with a dry run's report of its dataset, its first CPU count and its CPUs."""
    slurm = site()
    slurm.nodes = {name: replace(node, mem_mib=64_000) for name, node in slurm.nodes.items()}
    slurm.jobs[2] = replace(slurm.jobs[2], mem_per_node_mib=3000)
    curve = replace(CURVE, points=(*CURVE.points[:-1], Point(8, 5.0, 0.01)))
    told = {**STAGES, "detail": {"host_mem_gib": 2.5, **(detail or {})}, "cpus": cpus or sweep_figures(curve)}
    with make_controller(slurm, (), **OPTIONS) as controller:
        run = dry_run_of(slurm, controller)
        end_dry_run(slurm, run, 2, **told, **({"reads": reads} if reads else {}))
        controller.cycle()
        slurm.end(1)
        for _ in range(3):
            slurm.tick()
            controller.cycle()
    return slurm


def test_a_new_model_is_swept_and_later_jobs_are_planned_with_it(make_controller, store):
    slurm = planned_with(make_controller)
    (asked,) = slurm.submitted.values()
    assert (asked.cpu_count, asked.time_limit_s) == (16, 660)  # two of four GPUs' shares of 32 CPUs
    assert "--sweep 4 16" in asked.script
    (found,) = stored(store)
    assert (found.name, found.cpu.saturating_cpus, found.process_gib) == (str(KEY), 5, 2.5)
    assert slurm.jobs[2].cpu_count == 5


@pytest.mark.parametrize(
    "told",
    [
        {"points": [[32, 5.0, 0.01, 1]], "least": 32, "open": 0, "runs": 1},  # the dry run had 16
        {"points": [[4, -5.0, 0.01, 1]], "least": 4, "open": 0, "runs": 1},
        {"points": [[4, 5.0]], "least": 4},
        {"points": 7},
    ],
)
def test_a_sweep_that_cannot_be_true_costs_only_itself(make_controller, store, told):
    planned_with(make_controller, cpus=told)
    assert stored(store) == []
    assert store.get(KEY) is not None


@pytest.mark.parametrize(
    ("workers", "busy_load_s", "overlap"), [(True, 0.1, 1.0), (False, 0.1, 0.0), (False, 0.4, 0.75), (False, None, 0.0)]
)
def test_the_next_plan_gives_memory_for_the_dataset(make_controller, store, workers, busy_load_s, overlap):
    detail = {} if busy_load_s is None else {"busy_s": [busy_load_s, 0.2, 0.3, 0.0]}
    job = planned_with(make_controller, {**READS, "workers": workers}, detail).jobs[2]
    (found,) = stored(store)
    assert asdict(found.dataset) == pytest.approx(asdict(Dataset(8000 / 1024, 8.0, 16.0, overlap)), rel=0.001)
    assert job.cpu_count == 5
    # Its demand, and what makes it as fast as the proportional share of the node, which has room for the whole dataset.
    assert 6000 < 0.99 * found.demand.mem_gib * 1024 < job.mem_per_node_mib < 2.5 * 1024 + 8010


@pytest.mark.parametrize(
    "wrong", [{"items": -8000}, {"items": "nan"}, {"items": [8000]}, {"bytes_per_s": 0.0}, {"bytes_per_s": 1e30}]
)
def test_a_dataset_that_cannot_be_true_costs_only_itself(make_controller, store, wrong):
    job = planned_with(make_controller, {**READS, **wrong}).jobs[2]
    (found,) = stored(store)
    assert (found.dataset, found.cpu.saturating_cpus, job.cpu_count) == (None, 5, 5)
    assert job.mem_per_node_mib == 3000


def test_a_dataset_larger_than_any_node_keeps_no_job_waiting(make_controller, store):
    job = planned_with(make_controller, {**READS, "items": 10**9}).jobs[2]
    assert stored(store)[0].dataset.dataset_gib > 900_000
    assert job.state is JobState.RUNNING
    assert 3000 <= job.mem_per_node_mib <= 64_000


@pytest.mark.parametrize("options", [{"policy": "muri-s"}, {"allocation": {"cpus": "off"}}])
def test_no_sweep_where_it_would_not_be_used(make_controller, options):
    slurm = site()
    with make_controller(slurm, (), **{**OPTIONS, **options}) as controller:
        dry_run_of(slurm, controller)
    asked = list(slurm.submitted.values())[-1]
    assert (asked.cpu_count, asked.time_limit_s, "--sweep" in asked.script) == (4, 360, False)
