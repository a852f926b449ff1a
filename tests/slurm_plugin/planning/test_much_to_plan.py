"""The effort of a decision grows with jobs and with nodes, not with jobs times nodes."""

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest
from at_work import behind_pilot, candidate, decided, of_kind
from fake_slurm import make_node

from muri.slurm_plugin.planning.actions import Join
from muri.slurm_plugin.records.cluster import Node
from muri.slurm_plugin.records.roles import ManagedJob

READS: Counter[str] = Counter()


class WatchedNode(Node):
    """Counts how often anything of it is read."""

    def __getattribute__(self, name: str) -> Any:
        READS["node"] += 1
        return super().__getattribute__(name)


def watched(number: int, **changes: Any) -> Node:
    node = make_node(f"n{number}", gpu_count=1, **changes)
    return WatchedNode(**{each.name: getattr(node, each.name) for each in fields(Node)})


def node_reads(waiting: int, nodes: int, policy: str, **changes: Any) -> int:
    """Reads of a cycle with so many jobs that wait, and as many that were let go and wait for Slurm."""
    jobs = [candidate(1 + number, "m2") for number in range(waiting)]
    free = {"licenses": "", "held": False, "reason": "Priority", "gpu_count": 1}
    jobs += [candidate(1 + waiting + number, "m2", **free) for number in range(waiting)]
    READS.clear()
    decided(jobs, [watched(number, **changes) for number in range(nodes)], policy=policy)
    return READS["node"]


@pytest.mark.parametrize("policy", ["auto", "synergy", "sjf-bsbf", "horus"])
@pytest.mark.parametrize("taken", [0, 1])
def test_no_job_that_waits_has_all_nodes_looked_at(policy: str, taken: int) -> None:
    nodes = 40
    few, many = (node_reads(waiting, nodes, policy, gpus_allocated=taken) for waiting in (20, 60))
    # What starts looks at its own nodes a few times.
    assert many - few < 40 * 20, (few, many)


def job_reads(count: int, users: int) -> int:
    """Reads of jobs in a cycle in which a job of each of so many users joins one of that user's groups."""
    jobs = []
    for number in range(count):
        own = [*behind_pilot(number, candidate(2000 + number)), candidate(1 + number, "m2")]
        user = number % users
        jobs += [replace(job, user=f"user{user}", uid=5000 + user) for job in own]
    nodes = [make_node(f"n{number}", gpu_count=1, gpus_allocated=1, cpus_allocated=6) for number in range(count)]
    READS.clear()
    assert len(of_kind(decided(jobs, nodes), Join)) == count
    return READS["job"]


@pytest.mark.parametrize("all_of_one", [False, True])
def test_twice_as_many_joins_take_twice_as_many_looks(monkeypatch: pytest.MonkeyPatch, all_of_one: bool) -> None:
    def counted(job: ManagedJob, name: str) -> Any:
        READS["job"] += 1
        return object.__getattribute__(job, name)

    monkeypatch.setattr(ManagedJob, "__getattribute__", counted, raising=False)
    few, many = (job_reads(count, 1 if all_of_one else count) for count in (30, 60))
    assert many < 2.3 * few, (few, many)
