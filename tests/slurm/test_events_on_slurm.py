"""Cycles on events on a real Slurm: jobs start within seconds of an arrival or an end, at an interval of six minutes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from conftest import emptied
from muri_cluster import MuriCluster

NOTICE = "/run/muri/notice"
INTERVAL_S = 360.0


@pytest.fixture(params=["one_gpu_sandbox", "trixie_one_gpu_sandbox"])
def muri(request: pytest.FixtureRequest) -> Iterator[MuriCluster]:
    for driver in emptied(request.getfixturevalue(request.param)):
        cluster = MuriCluster(driver)
        cluster.know_profiles()
        yield cluster


@contextmanager
def at_work(muri: MuriCluster, *options: str) -> Iterator[None]:
    """Have a controller that has run its first cycle, and waits for the next one."""
    command = f"exec muri-controller {' '.join(options)} 2>>{muri.state_dir}.log"
    process = muri.driver.popen("sh", "-c", command, user="root")
    try:
        muri.driver.wait_until(lambda: is_file(muri, f"{muri.state_dir}/status.json"), "the first cycle")
        yield
    finally:
        process.terminate()
        process.communicate(timeout=240)


def is_file(muri: MuriCluster, path: str) -> bool:
    return muri.driver.run("test", "-f", path, user="root", check=False).returncode == 0


def cycles(muri: MuriCluster) -> int:
    """How many cycles have finished."""
    code = (
        "import sys; from pathlib import Path; from muri.slurm_plugin.records.journal import *;"
        "print(Journal(Path(sys.argv[1])).facts(COUNTERS))"
    )
    return muri.python(code, f"{muri.state_dir}/journal.db").stdout


def seconds_between(muri: MuriCluster, job: int, other: int = 0) -> float:
    """From a job's submission, or another's end, to its start, as Slurm notes it."""
    begun = muri.driver.job(other)["EndTime"] if other else muri.driver.job(job)["SubmitTime"]
    begun_s, start_s = (
        time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S")) for text in (begun, muri.driver.job(job)["StartTime"])
    )
    return start_s - begun_s


@pytest.mark.parametrize("form", [("--interval", "360"), ("--events",)])
def test_jobs_start_within_seconds_of_an_arrival_and_of_an_end(muri, form):
    muri.configure(interval_s=INTERVAL_S, grouping={"max_group_size": 1})
    with at_work(muri, *form):
        first = muri.submit("load", iterations=150)
        begun = time.time()
        muri.driver.wait_state(first, "RUNNING", deadline_s=60)
        print("submit to start", seconds_between(muri, first), time.time() - begun)
        second = muri.submit("load", iterations=10)
        muri.driver.wait_state(first)
        muri.driver.wait_state(second, deadline_s=60)
        print("end to start", seconds_between(muri, second, first))
        print(muri.controller_log())
        print(cycles(muri), muri.driver.run("ls", "-l", NOTICE).stdout, muri.driver.run("sdiag").stdout[:900])
