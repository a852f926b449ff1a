"""CPUs of members on a real Slurm: they share them in layers, or have them to themselves beside ordinary jobs."""

from collections.abc import Iterator

import pytest
from muri_cluster import MuriCluster
from sandboxes import on_both_releases

KINDS = ("load", "propagate", "synchronize")
ALL_CPUS = 16  # Of a node of the sandbox
ALL_OF_A_NODE = (f"-c{ALL_CPUS}", "--mem=2G")


def cpus_and_sharing(muri: MuriCluster, *jobs: int) -> list[tuple[str, str]]:
    """The CPUs that each job has, and whether it shares them."""
    fields = [muri.driver.job(job) for job in jobs]
    return [(field["NumCPUs"], field["OverSubscribe"]) for field in fields]


def ordinary(muri: MuriCluster) -> None:
    """Have another user hold two CPUs of the node."""
    job = muri.driver.submit("-p", "train", "-c2", "--wrap=exec sleep infinity", user="bob")
    muri.driver.wait_state(job, "RUNNING")


def end_well(muri: MuriCluster, jobs: list[int]) -> None:
    """Wait for the jobs' ends; all must have come to theirs."""
    fields = muri.cycles_until_ended(*jobs)
    assert {field["JobState"] for field in fields.values()} == {"COMPLETED"}


def first_two_of_three(muri: MuriCluster) -> list[tuple[str, str]]:
    """Run three jobs of six CPUs, two of which start as a group; returns what the pilot job and these two have."""
    with muri.training(*KINDS):
        muri.know_profiles()
        jobs = [muri.submit(kind, "-c6", iterations=5) for kind in KINDS]
        muri.cycle()
        first = [job for job in jobs if "muri-grant:" in muri.driver.job(job)["AdminComment"]]
        assert len(first) == 2
        muri.wait_grouped(*first)
        (pilot,) = muri.pilots()
        found = cpus_and_sharing(muri, pilot, *first)
    end_well(muri, jobs)
    return found


def test_jobs_that_ask_for_all_cpus_of_a_node_share_a_gpu_with_all_of_them(muri: MuriCluster) -> None:
    with muri.training(*KINDS):
        jobs, pilot = muri.start_group(*KINDS, request=ALL_OF_A_NODE)
        assert cpus_and_sharing(muri, pilot, *jobs) == [("1", "YES"), *[(str(ALL_CPUS), "YES")] * len(KINDS)]
        assert [muri.driver.job(job)["MinMemoryNode"] for job in jobs] == ["2G"] * len(KINDS)
    end_well(muri, jobs)


def test_beside_ordinary_jobs_a_group_has_its_cpus_to_itself(muri: MuriCluster) -> None:
    ordinary(muri)
    assert first_two_of_three(muri) == [("1", "OK"), ("6", "OK"), ("6", "OK")]  # 1 + 6 + 6 of 14


def test_a_job_with_too_many_cpus_for_a_group_at_work_waits_until_these_are_free(muri: MuriCluster) -> None:
    ordinary(muri)
    with muri.training("load", "propagate"):
        (jobs, pilot) = muri.start_group("load", "propagate")
        large = muri.submit("synchronize", "-c14", iterations=5)
        muri.cycle()
        assert muri.driver.job(large)["JobState"] == "PENDING"
        assert "CPUs left" in muri.explain(large)
        small = muri.submit("preprocess", "-c4", iterations=5)
        muri.cycle()
        assert muri.driver.wait_state(small)["JobState"] == "COMPLETED"
        assert muri.pilots() == [pilot]
    end_well(muri, jobs)


@on_both_releases
def test_steps_of_members_have_the_cpus_that_they_share(muri: MuriCluster) -> None:
    step = 'srun sh -c "echo $SLURM_CPUS_PER_TASK CPUs"'
    muri.driver.write("train.sh", f'#!/bin/sh\n{step}\nmuri run /home/alice/train.py "$@"\n{step}\n')
    with muri.training():
        jobs, _ = muri.start_group(*KINDS, request=ALL_OF_A_NODE)
    muri.cycles_until_ended(*jobs)
    assert [muri.output(job).count(f"{ALL_CPUS} CPUs\n") for job in jobs] == [2] * len(KINDS)


@pytest.fixture
def sharing_nothing(muri: MuriCluster) -> Iterator[MuriCluster]:
    """A cluster whose partition gives each CPU to one job."""
    change = ("scontrol", "update", "PartitionName=train")
    muri.driver.run(*change, "OverSubscribe=NO", user="root")
    yield muri
    muri.driver.run(*change, "OverSubscribe=YES:8", user="root")


def test_where_each_cpu_is_given_to_one_job_a_group_needs_the_sum(sharing_nothing: MuriCluster) -> None:
    assert [cpus for cpus, _ in first_two_of_three(sharing_nothing)] == ["1", "6", "6"]  # 1 + 6 + 6 of 16
