"""GPUs that are near each other, on a real Slurm: a pilot job goes to the node whose free GPUs are an island."""

from collections.abc import Iterator

import pytest
from muri_cluster import MuriCluster, slow_in
from sandboxes import emptied, start

from muri.profiler.records import ProfileKey
from muri.slurm_plugin.gateway.tables import gpus_by_node, held_in
from sandbox.cluster import Partition, Shape
from sandbox.driver import Driver

PAIRS = Shape(nodes=2, gpus_per_node=4, island_gpus=2, extra_partitions=(Partition("train", "n[1-2]"),))
RANKS_SH = """\
#!/bin/sh
exec srun --unbuffered muri run /home/alice/train.py "$@"
"""


@pytest.fixture(scope="module")
def linked() -> Iterator[Driver]:
    """Two nodes of four GPUs, which gres.conf links in pairs."""
    yield from start("forky", PAIRS, "pairs")


@pytest.fixture
def pairs(linked: Driver) -> Iterator[Driver]:
    yield from emptied(linked)


def in_use(driver: Driver, node: str) -> tuple[int, ...]:
    text = driver.run("scontrol", "--details", "--oneliner", "show", "job", user="root", check=False).stdout
    return gpus_by_node(held_in(text), 64).get(node, ())


def hold(driver: Driver, node: str, gpus: int) -> list[int]:
    """Start ordinary jobs that hold a GPU each."""
    jobs = [driver.submit("-p", "train", "-w", node, "--gres=gpu:1", "--wrap=exec sleep 3000") for _ in range(gpus)]
    for job in jobs:
        driver.wait_state(job, "RUNNING")
    return jobs


def test_a_pilot_job_goes_where_the_free_gpus_are_linked(pairs: Driver) -> None:
    muri = MuriCluster(pairs)
    muri.configure(partitions=["train"])
    muri.know(slow_in("propagate", ProfileKey("ranks", 32, 2, "gpu")))
    pairs.write("ranks.sh", RANKS_SH)
    by_gpu = {}
    for job in hold(pairs, "n1", 4):
        details = pairs.run("scontrol", "--details", "--oneliner", "show", "job", str(job), user="root").stdout
        by_gpu[gpus_by_node(held_in(details), 64)["n1"]] = job
    hold(pairs, "n2", 2)
    # One GPU of each pair is free on the first node, a whole pair on the second: as many on both.
    pairs.run("scancel", str(by_gpu[1,]), str(by_gpu[3,]), user="root")
    pairs.wait_until(lambda: in_use(pairs, "n1") == (0, 2), "a free GPU of each pair")
    assert in_use(pairs, "n2") == (0, 1)
    mark = "--muri=model=ranks,batch-size=32,duration=60s"
    job = pairs.submit("-p", "train", "--ntasks=2", "--gres=gpu:2", mark, "/home/alice/ranks.sh", "4000", "0", "load")
    muri.cycle()
    pairs.wait_state(job, "RUNNING")
    assert pairs.job(job)["NodeList"] == "n2"
    assert len(muri.pilots()) == 1
    assert in_use(pairs, "n2") == (0, 1, 2, 3)


@pytest.mark.parametrize(("held", "given"), [((0,), (1, 2)), ((1,), (0, 2)), ((0, 1), (2, 3)), ((), (0, 1))])
def test_slurm_gives_the_first_gpu_and_those_linked_to_it(pairs: Driver, held: tuple[int, ...], given: tuple[int, ...]):
    """What Muri expects of Slurm, which looks for no better pair among the GPUs that are free."""
    for job, gpu in zip(hold(pairs, "n1", 4), range(4), strict=True):
        if gpu not in held:
            pairs.run("scancel", str(job), user="root")
    pairs.wait_until(lambda: in_use(pairs, "n1") == held, "free GPUs")
    two = pairs.submit("-p", "train", "-w", "n1", "--gres=gpu:2", "--wrap=exec sleep 3000")
    pairs.wait_state(two, "RUNNING")
    assert in_use(pairs, "n1") == tuple(sorted((*held, *given)))
