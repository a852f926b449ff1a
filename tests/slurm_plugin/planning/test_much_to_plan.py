"""What a decision looks at grows with jobs and with nodes, not with jobs times nodes."""

import sys
from collections import Counter
from dataclasses import fields, replace
from types import FrameType
from typing import Any

import pytest
from fake_slurm import FOUR_KINDS, GPUS_REMOVABLE, NOW_S, make_node
from test_joining import candidate, group

from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.assemble import policy_of
from muri.slurm_plugin.planning.actions import Join
from muri.slurm_plugin.planning.cycle_input import CycleInput, Knowledge
from muri.slurm_plugin.planning.decision import Decision, decide
from muri.slurm_plugin.records.cluster import Job, JobState, Node, Snapshot
from muri.slurm_plugin.records.roles import view_of

READS: Counter[str] = Counter()


class WatchedNode(Node):
    """Counts how often anything of it is read."""

    def __getattribute__(self, name: str) -> Any:
        READS["node"] += 1
        return super().__getattribute__(name)


def watched(number: int, **changes: Any) -> Node:
    node = make_node(f"n{number}", gpu_count=1, **changes)
    return WatchedNode(**{each.name: getattr(node, each.name) for each in fields(Node)})


def decided(jobs: list[Job], nodes: list[Node], policy: str) -> Decision:
    snapshot = Snapshot(NOW_S, "c", "26.05", tuple(jobs), tuple(nodes), gpu_removal=GPUS_REMOVABLE)
    knowledge = Knowledge({profile.key: profile for profile in FOUR_KINDS})
    config = Config(policy=policy)
    return decide(CycleInput(view_of(snapshot), knowledge, config), policy_of(config))


def node_reads(waiting: int, nodes: int, policy: str, **changes: Any) -> int:
    """Reads of a cycle with so many jobs that wait, and as many that were let go and wait for Slurm."""
    jobs = [candidate(1 + number) for number in range(waiting)]
    free = {"licenses": "", "held": False, "reason": "Priority", "gpu_count": 1}
    jobs += [replace(candidate(1 + waiting + number), **free) for number in range(waiting)]
    READS.clear()
    decided(jobs, [watched(number, **changes) for number in range(nodes)], policy)
    return READS["node"]


@pytest.mark.parametrize("policy", ["auto", "synergy-tune-fifo", "sjf-bsbf", "horus"])
@pytest.mark.parametrize("taken", [0, 1])
def test_no_job_that_waits_has_all_nodes_looked_at(policy: str, taken: int) -> None:
    nodes = 40
    few, many = (node_reads(waiting, nodes, policy, gpus_allocated=taken) for waiting in (20, 60))
    # What starts looks at its own nodes a few times.
    assert many - few < 40 * 20, (few, many)


def calls_of_joins(count: int) -> int:
    """Python calls of a cycle in which a job of each of so many users joins that user's group."""
    jobs = []
    for number in range(count):
        users = [*group(number), candidate(1 + number)]
        jobs += [replace(job, user=f"user{number}", uid=5000 + number) for job in users]
    nodes = [make_node(f"n{number}", gpu_count=1, gpus_allocated=1, cpus_allocated=6) for number in range(count)]
    calls = 0

    def count_call(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        decision = decided(jobs, nodes, "muri-s")
    finally:
        sys.setprofile(None)
    assert sum(isinstance(action, Join) for action in decision.actions) == count
    assert all(job.state is JobState.RUNNING for job in decision.view.jobs.values() if job.job_id >= 1000)
    return calls


def test_twice_as_many_joins_take_twice_as_many_looks() -> None:
    calls_of_joins(20)  # what is imported late is imported now
    few, many = calls_of_joins(60), calls_of_joins(120)
    assert many < 2.3 * few, (few, many)
