"""Measuring an all-reduce: between real processes, and what follows from the times."""

import json
import sys

import pytest
from click.testing import CliRunner

from muri.cli import cli, run_command
from muri.profiler import allreduce
from muri.profiler.allreduce import AllReduceError, Timing, bandwidths, fit, measure_on_this_node, ring_s, step_of
from muri.profiler.commands import measure, profile
from muri.profiler.store import ProfileStore

STEP = {
    "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "41000", "SLURM_STEP_NODELIST": "node[07-08]",
}  # fmt: skip


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("MURI_PROFILES", str(tmp_path / "profiles.db"))
    for name in STEP:
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "profiles.db"


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_the_fit_finds_what_the_ring_was_made_of(ranks):
    timings = [Timing(size, ring_s(size / 2000.0, 50e-6, ranks)) for size in allreduce.SIZES_MIB]
    found = fit(timings, ranks)
    assert found.mib_per_s == pytest.approx(2000.0, rel=0.01)
    assert found.latency_s == pytest.approx(50e-6, rel=0.05)


def test_times_that_do_not_grow_are_refused():
    with pytest.raises(AllReduceError, match="takes no longer with more data"):
        fit([Timing(size, 0.001) for size in allreduce.SIZES_MIB], 2)


def test_a_bandwidth_between_real_processes_is_stored(path):
    found = CliRunner().invoke(profile, ["bandwidth", "--backend", "gloo", "--json"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    (document,) = json.loads(found.stdout)["bandwidths"]
    assert (document["name"], document["backend"]) == ("gpu/2x1", "gloo")
    assert document["mib_per_s"] > 0
    with ProfileStore(path) as store:
        (stored,) = bandwidths(store)
    assert stored.mib_per_s == document["mib_per_s"]
    assert "gpu/2x1: " in CliRunner().invoke(profile, ["bandwidth", "--list"], catch_exceptions=False).output


def test_a_rank_that_fails_is_named(tmp_path, monkeypatch):
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho 'no room for rank '$6 >&2; exit 3\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    with pytest.raises(AllReduceError, match="rank 0 ended with code 3; its last words: no room for rank 0"):
        measure_on_this_node(2, "gloo")


def test_tasks_of_a_step_are_the_ranks():
    step = step_of(STEP)
    assert step == (3, 8, 2, 1, "tcp://node07:21000")
    assert step.meeting("gloo") == ("tcp://node07:21000", 3, 8, "gloo", 1)
    assert step_of(STEP | {"MASTER_ADDR": "ib7", "MASTER_PORT": "9"}).init == "tcp://ib7:9"


@pytest.mark.parametrize("changes", [{"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_PROCID": ""}])
def test_anything_else_is_no_step(changes):
    assert step_of(STEP | changes) is None
    assert step_of({}) is None


@pytest.mark.parametrize(("rank", "told"), [("0", ["gpu/4x2"]), ("3", [])])
def test_each_task_of_a_step_measures_and_the_first_one_tells_and_stores(path, monkeypatch, capsys, rank, told):
    met = []

    def timed(*meeting):
        met.append(meeting)
        return [Timing(size, ring_s(size / 2000.0, 50e-6, 8)) for size in allreduce.SIZES_MIB]

    monkeypatch.setattr(measure, "time_all_reduce", timed)
    for name, value in (STEP | {"SLURM_PROCID": rank}).items():
        monkeypatch.setenv(name, value)
    assert run_command(cli, ["profile", "bandwidth", "--backend", "gloo"]) == 0
    assert met == [("tcp://node07:21000", int(rank), 8, "gloo", 1)]
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()[:1]] == told
    with ProfileStore(path) as store:
        assert [found.name for found in bandwidths(store)] == told


def test_a_backend_that_the_node_cannot_have_is_refused(capsys):
    assert run_command(cli, ["profile", "bandwidth", "--backend", "nccl", "--ranks", "64"]) == 1
    assert "nccl needs a GPU for each rank: 64 ranks here" in capsys.readouterr().err
