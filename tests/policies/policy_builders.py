"""Jobs, nodes and requests for the tests of planning, and hypothesis strategies for them."""

from collections import Counter

from hypothesis import strategies as st

from muri.policies.types import FreeNode, Plan, PlanJob, PlanRequest
from muri.profiler.records import ProfileKey, StageProfile

KINDS = {
    "storage": (1.0, 0.1, 0.1, 0.1),
    "cpu": (0.1, 1.0, 0.1, 0.1),
    "gpu": (0.1, 0.1, 1.0, 0.1),
    "network": (0.1, 0.1, 0.1, 1.0),
}


def make_profile(stage_s, *, iteration_s=None, mem_gib=1.0, model="model"):
    return StageProfile(
        ProfileKey(model, 32, 1, "gpu"),
        *stage_s,
        iteration_s=sum(stage_s) if iteration_s is None else iteration_s,
        gpu_mem_gib=mem_gib,
    )


def make_job(job_id, kind="gpu", **changes):
    """A job of a bottleneck kind (None: no profile), of alice, with one GPU in partition main."""
    profile = None if kind is None else make_profile(KINDS[kind], model=kind)
    fields = {"user": "alice", "partition": "main", "gpu_count": 1, "submit_s": float(job_id)}
    return PlanJob(job_id=job_id, **(fields | {"profile": profile} | changes))


def make_node(name, free_gpus, **changes):
    fields = {"partitions": ("main",), "gpu_count": max(free_gpus, 2)}
    return FreeNode(name=name, free_gpus=free_gpus, **(fields | changes))


def make_request(jobs, nodes, **changes):
    return PlanRequest(jobs=tuple(jobs), nodes=tuple(nodes), **({"now_s": 1000.0} | changes))


_time_s = st.floats(0, 5, allow_nan=False).map(lambda value: round(value, 3))


@st.composite
def profiles(draw):
    stage_s = draw(st.tuples(_time_s, _time_s, _time_s, _time_s))
    overlap = draw(st.sampled_from((1.0, 0.6, 1.5)))
    return make_profile(
        stage_s, iteration_s=max(0.001, sum(stage_s) * overlap), mem_gib=draw(st.sampled_from((0.0, 4.0, 9.0)))
    )


@st.composite
def pending_jobs(draw, job_id):
    groupable = draw(st.booleans() | st.just(True))
    return PlanJob(
        job_id=job_id,
        user=draw(st.sampled_from(("alice", "bob"))),
        partition=draw(st.sampled_from(("main", "debug", "far"))),
        gpu_count=draw(st.sampled_from((1, 1, 1, 2, 2, 4, 16))),
        submit_s=draw(st.floats(0, 1000)),
        profile=draw(st.none() | profiles() | profiles() | profiles()),
        remaining_s=draw(st.none() | st.floats(0, 1e6)),
        attained_gpu_s=draw(st.floats(0, 1e6)),
        groupable=groupable,
        alone_reason="" if groupable else "asked to run alone",
    )


@st.composite
def requests(draw):
    job_ids = draw(st.lists(st.integers(1, 99), max_size=14, unique=True))
    jobs = [draw(pending_jobs(job_id)) for job_id in job_ids]
    node_count = draw(st.integers(0, 5))
    nodes = []
    for index in range(node_count):
        gpu_count = draw(st.sampled_from((0, 2, 4, 8)))
        free = draw(st.integers(0, gpu_count or 8))
        partitions = draw(st.sampled_from((("main",), ("debug",), ("main", "debug"), ("far",))))
        memory = draw(st.sampled_from((0.0, 8.0, 40.0)))
        nodes.append(FreeNode(f"n{index}", partitions, free, memory, gpu_count))
    return make_request(
        jobs, nodes, max_group_size=draw(st.integers(1, 4)), same_user=draw(st.sampled_from((True, True, False)))
    )


def decided_ids(plan: Plan) -> list[int]:
    ids = [job_id for group in plan.groups for job_id in group.members]
    return ids + [item.job_id for item in (*plan.solo, *plan.waiting)]


def gpus_by_node(plan: Plan, request: PlanRequest) -> Counter:
    count = {job.job_id: job.gpu_count for job in request.jobs}
    used = Counter()
    for group in plan.groups:
        used[group.node] += group.gpu_count
    for solo in plan.solo:
        if solo.node:
            used[solo.node] += count[solo.job_id]
    return used
