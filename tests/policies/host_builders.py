"""Requests with CPUs and host memory, and their plans."""

from hypothesis import strategies as st
from policy_builders import make_job, make_node, make_request

from muri.policies.registry import get_policy
from muri.policies.traits import Demand, Sensitivity
from muri.policies.types import CpuMemShare, all_jobs

CPUS = (1.0, 2.0, 3.0, 6.0, 12.0)
MEM_GIB = (10.0, 60.0, 120.0)


def scaling(most_cpus, mem_gib=10.0):
    """Throughput grows with CPUs up to a number of them, and is a tenth with less memory than it needs."""
    rows = tuple(
        tuple(min(cpus, most_cpus) * (1.0 if amount >= mem_gib else 0.1) for amount in MEM_GIB) for cpus in CPUS
    )
    return Sensitivity(CPUS, MEM_GIB, rows, Demand(float(most_cpus), mem_gib))


HUNGRY = scaling(6)
"""Twice as fast with 6 CPUs per GPU as with 3."""
MODEST = scaling(1)
"""As fast with 1 CPU per GPU as with any number."""


def make_host(name, gpus=4, cpus=12.0, mem_gib=240.0, **changes):
    """An idle node: 3 CPUs and 60 GiB for each of its GPUs."""
    fields = {"gpu_count": gpus, "cpu_count": cpus, "mem_gib": mem_gib, "free_cpus": cpus, "free_mem_gib": mem_gib}
    return make_node(name, changes.pop("free_gpus", gpus), **(fields | changes))


def job(job_id, sensitivity=None, **changes):
    return make_job(job_id, None, **({"sensitivity": sensitivity, "preemptible": True} | changes))


def shares_by_job(plan):
    """CPUs and memory of each job on one node, as pairs."""
    return {job_id: (shares[0].cpus, shares[0].mem_gib) for job_id, shares in plan.cpu_mem_shares.items()}


def nodes_by_job(plan):
    return {solo.job_id: solo.node for solo in plan.solo}


def speed_ratios(request, plan):
    """Throughput of each job that the plan runs, relative to what the proportional shares of its nodes would give."""
    jobs, nodes = {item.job_id: item for item in all_jobs(request)}, {node.name: node for node in request.nodes}
    found = {}
    for solo in plan.solo:
        sensitivity = jobs[solo.job_id].sensitivity
        if sensitivity is None or solo.job_id not in plan.cpu_mem_shares:
            continue
        given = {share.node: share for share in plan.cpu_mem_shares[solo.job_id]}
        for gpus in solo.gpus:
            node = nodes[gpus.node]
            share = given.get(gpus.node, CpuMemShare(gpus.node, 0.0, 0.0))
            reached = _at(sensitivity, node, share.cpus / gpus.gpu_count, share.mem_gib / gpus.gpu_count)
            usual = _at(sensitivity, node, node.cpu_count / node.gpu_count, node.mem_gib / node.gpu_count)
            found[solo.job_id, gpus.node] = (reached, usual)
    return found


def _at(sensitivity, node, cpus, mem_gib):
    unlimited = float("inf")
    return sensitivity.throughput_at(cpus if node.cpu_count else unlimited, mem_gib if node.mem_gib else unlimited)


@st.composite
def sensitivities(draw):
    """Any matrix that never falls with more resources, and a demand that need not be its true knee."""
    step = st.sampled_from((0.0, 0.0, 0.2, 1.0))
    row = [draw(st.sampled_from((0.0, 0.1, 1.0)))]
    for _ in MEM_GIB[1:]:
        row.append(row[-1] + draw(step))
    rows = [tuple(row)]
    for _ in CPUS[1:]:
        grown = [value + draw(step) for value in rows[-1]]
        rows.append(tuple(max(grown[: index + 1]) for index in range(len(grown))))
    demand = Demand(draw(st.sampled_from(CPUS)), draw(st.sampled_from((0.0, *MEM_GIB))))
    return Sensitivity(CPUS, MEM_GIB, tuple(rows), demand)


@st.composite
def host_jobs(draw, job_ids, kinds):
    jobs = []
    for job_id in job_ids:
        gpu_count = draw(st.sampled_from((1, 1, 1, 2, 3, 4, 6)))
        jobs.append(
            job(
                job_id,
                draw(st.sampled_from((None, *kinds))),
                gpu_count=gpu_count,
                node_count=2 if gpu_count % 2 == 0 and draw(st.booleans()) else 1,
                user=draw(st.sampled_from(("alice", "bob"))),
                partition=draw(st.sampled_from(("main", "main", "debug"))),
                submit_s=float(draw(st.integers(0, 900))),
                remaining_s=draw(st.none() | st.floats(0, 1e5)),
                attained_gpu_s=float(draw(st.integers(0, 10_000))),
                restart_s=draw(st.sampled_from((0.0, 30.0, 400.0))),
                preemptible=draw(st.booleans() | st.just(True)),
            )
        )
    return jobs


@st.composite
def host_requests(draw):
    """An idle cluster of nodes of several sizes, some of unknown CPUs or memory, and a queue; then more jobs."""
    kinds = draw(st.lists(sensitivities(), min_size=1, max_size=3))
    nodes = [
        make_host(
            f"n{index}",
            draw(st.sampled_from((2, 4, 4, 8))),
            draw(st.sampled_from((0.0, 8.0, 12.0, 24.0))),
            draw(st.sampled_from((0.0, 240.0, 500.0))),
            partitions=partitions,
        )
        for index, partitions in enumerate(
            [("main", "debug"), *draw(st.lists(st.sampled_from((("main",), ("debug",))), max_size=2))]
        )
    ]
    count = draw(st.integers(1, 10))
    jobs = draw(host_jobs(range(1, count + 1), kinds))
    later = draw(host_jobs(range(100, 100 + draw(st.integers(0, 4))), kinds))
    capacity = {name: sum(node.gpu_count for node in nodes if name in node.partitions) for name in ("main", "debug")}
    later = [item for item in later if item.gpu_count <= capacity[item.partition]]
    request = make_request(
        [item for item in jobs if item.gpu_count <= capacity[item.partition]],
        nodes,
        larger_than_a_node=draw(st.sampled_from(("whole-nodes", "slurm"))),
        interval_s=draw(st.sampled_from((0.0, 300.0))),
    )
    return request, later


def request_of(jobs, nodes, **changes):
    return make_request(jobs, nodes, larger_than_a_node="whole-nodes", **({"interval_s": 300.0} | changes))


def plan_of(name, jobs, nodes, options=None, **changes):
    return get_policy(name, options).plan(request_of(jobs, nodes, **changes))
