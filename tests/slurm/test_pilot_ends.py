"""However a pilot job ends, the job that gets its GPUs next has them for itself, and members are back in the queue."""

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from pilot_ends import KINDS, WAYS, PilotEnds
from sandboxes import SITE, emptied, sites, start, suite_and_version

from sandbox.driver import Driver
from sandbox.support import SPANK_TARGET

SITES = sites("forky", "trixie", "forky-v2", constrained=True, group="ends")
pytestmark = pytest.mark.parametrize("constrained_sandbox", SITES, indirect=True)

KILLS = int(os.environ.get("MURI_KILLS", "60"))
"""On all sites together. 200 take eight minutes on two cores."""

#: Slurm looks at limits once in a while, and tells a slurmd that was away late which jobs are to end.
SLOW = {"slurmd killed", "its time limit"}
OFTEN = {way: 1 if way == "slurmd restarted" else 10 for way in WAYS if way not in SLOW}


@pytest.fixture(scope="session")
def constrained_sandbox(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """Five nodes with two GPUs each for alice's jobs, devices constrained."""
    suite, version = suite_and_version(request.param)
    yield from start(suite, replace(SITE, nodes=6, constrained=version), f"ends-{request.param}")


@pytest.fixture
def ends(constrained_sandbox: Driver) -> Iterator[PilotEnds]:
    for driver in emptied(constrained_sandbox):
        yield PilotEnds(driver)


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.thorough) if way in SLOW else way for way in WAYS])
def test_no_member_outlives_its_pilots_end(ends: PilotEnds, way: str) -> None:
    group = ends.start(ends.nodes[0], "obeys", "ignores", "daemon")
    WAYS[way](ends, group)
    ends.ended(group)
    assert ends.holders() == []


def test_a_node_that_is_set_down_and_comes_back_at_once_gives_nothing_away_that_is_open(ends: PilotEnds) -> None:
    """Slurm does not wait for the epilogs of a node that is down."""
    group = ends.start(ends.nodes[0], "ignores", "daemon")
    change = f"scontrol update nodename={group.node} reason=test"
    ends.root(f"{change} state=drain; {change} state=down; {change} state=resume")
    ends.next_had_them_alone(group)
    for member in group.members:
        ends.driver.wait_until(lambda member=member: int(ends.driver.job(member)["Restarts"]) > 0, f"{member} back")
    ends.driver.wait_until(lambda: ends.holders() == [], "closed GPUs")


def test_processes_that_an_epilog_left_end_before_the_next_job_starts(ends: PilotEnds) -> None:
    group, plugin = ends.start(ends.nodes[0], "ignores", "daemon"), str(SPANK_TARGET)
    ends.root(f"scontrol update nodename={group.node} state=drain reason=test")
    ends.root(f"mv {plugin} {plugin}.away", on=group.node)
    try:
        WAYS["all slurmstepds killed"](ends, group)
        ends.driver.run("scancel", *map(str, group.members))
        for job in (group.pilot, *group.members):
            ends.driver.wait_state(job, "CANCELLED")
        shown = f"squeue --noheader --nodelist={group.node} --states=all --format=%t"
        ends.driver.wait_until(lambda: "CG" not in ends.root(shown), "the end of all epilogs")
    finally:
        ends.root(f"mv {plugin}.away {plugin}", on=group.node)
    assert {each.split()[0] for each in ends.holders()} == {group.node}
    ends.root(f"scontrol update nodename={group.node} state=resume")
    ends.next_had_them_alone(group)
    assert ends.holders() == []


def kill_often(ends: PilotEnds, node: str, times: int) -> int:
    """Let groups come and end on a node; whatever has a GPU open afterwards should not."""
    chosen = random.Random(node)
    for _ in range(times):
        kinds = chosen.choices(KINDS, k=chosen.randint(1, 3))
        (way,) = chosen.choices(list(OFTEN), list(OFTEN.values()))
        if way == "slurmd restarted":
            kinds.append("ignores")  # the epilog must still be there
        settled = chosen.random() < 0.8
        group = ends.start(node, *kinds, settled=settled)
        WAYS[way](ends, group)
        if settled or way != "all slurmstepds killed":
            ends.ended(group)
        else:  # where a slurmstepd was killed before it did or told anything, Slurm thinks that the job runs
            ends.next_had_them_alone(group)
        left = [each for each in ends.holders() if each.split()[0] in (node, "?")]
        assert left == [], (way, kinds, left)
        ends.driver.run("scancel", *map(str, group.members), str(group.pilot))
    return times


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_random_kills_leave_no_gpu_open(ends: PilotEnds) -> None:
    each = -(-KILLS // len(SITES) // len(ends.nodes))
    with ThreadPoolExecutor(len(ends.nodes)) as pool:
        done = list(pool.map(lambda node: kill_often(ends, node, each), ends.nodes))
    assert sum(done) == each * len(ends.nodes)
