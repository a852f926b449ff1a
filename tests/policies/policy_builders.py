"""Jobs, nodes and requests for the tests of planning, and hypothesis strategies for them."""

import dataclasses
import math
from collections import Counter

from hypothesis import strategies as st

from muri.policies.registry import get_policy
from muri.policies.siblings.packed import mem_gib_of
from muri.policies.traits import BatchModel, InterferenceTable, PairSpeed
from muri.policies.types import FreeNode, Group, Plan, PlanJob, PlanRequest, Running, Sharer, all_jobs
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


def busy(job_id, utilization, mem_gib=1.0, **changes):
    """A job that needs the GPU alone and, by telemetry, uses so much of it."""
    profile = make_profile((0.0, 0.0, 1.0, 0.0), mem_gib=mem_gib)
    return make_job(job_id, **({"profile": profile, "gpu_utilization": utilization} | changes))


def make_node(name, free_gpus, **changes):
    fields = {"partitions": ("main",), "gpu_count": max(free_gpus, 2)}
    return FreeNode(name=name, free_gpus=free_gpus, **(fields | changes))


def make_request(jobs, nodes, **changes):
    return PlanRequest(jobs=tuple(jobs), nodes=tuple(nodes), **({"now_s": 1000.0} | changes))


# Strategies are made once: making them takes longer than drawing from them.
_stages_s = st.tuples(*[st.floats(0, 5, allow_nan=False).map(lambda value: round(value, 3))] * 4)
_overlaps = st.sampled_from((1.0, 0.6, 1.5))
_job_mem_gib = st.sampled_from((0.0, 4.0, 9.0))


@st.composite
def profiles(draw):
    stage_s, overlap = draw(_stages_s), draw(_overlaps)
    return make_profile(stage_s, iteration_s=max(0.001, sum(stage_s) * overlap), mem_gib=draw(_job_mem_gib))


_mostly_profiles = st.sampled_from((st.none(), *[profiles()] * 3)).flatmap(lambda chosen: chosen)
_mostly_true = st.sampled_from((True, True, True, False))
_users = st.sampled_from(("alice", "bob"))
_partitions = st.sampled_from(("main", "debug", "far"))
_gpu_counts = st.sampled_from((1, 1, 1, 2, 2, 4, 16))
_submits_s = st.floats(0, 1000)
_domains = st.sampled_from(("", "", "", "account hep"))
_largest_groups = st.sampled_from((4, 4, 4, 9, 3, 2, 1))
_priorities = st.sampled_from((0, 0, 7, 4_294_967_295))
_amounts = st.floats(0, 1e6)
_perhaps_amounts = st.none() | _amounts


@st.composite
def pending_jobs(draw, job_id):
    groupable = draw(_mostly_true)
    return PlanJob(
        job_id=job_id,
        user=draw(_users),
        partition=draw(_partitions),
        gpu_count=draw(_gpu_counts),
        submit_s=draw(_submits_s),
        profile=draw(_mostly_profiles),
        remaining_s=draw(_perhaps_amounts),
        attained_gpu_s=draw(_amounts),
        groupable=groupable,
        alone_reason="" if groupable else "asked to run alone",
        domain=draw(_domains),
        largest_group=draw(_largest_groups),
        priority=draw(_priorities),
    )


_job_ids = st.lists(st.integers(1, 99), max_size=14, unique=True)
_node_counts = st.integers(0, 5)
_node_gpus = st.sampled_from((0, 2, 4, 8))
_free_gpus = {most: st.integers(0, most) for most in (2, 4, 8)}
_node_partitions = st.sampled_from((("main",), ("debug",), ("main", "debug"), ("far",)))
_node_mem_gib = st.sampled_from((0.0, 8.0, 40.0))
_group_sizes = st.integers(1, 4)
_same_user = st.sampled_from((True, True, False))


@st.composite
def requests(draw):
    jobs = [draw(pending_jobs(job_id)) for job_id in draw(_job_ids)]
    nodes = []
    for index in range(draw(_node_counts)):
        gpu_count = draw(_node_gpus)
        free = draw(_free_gpus[gpu_count or 8])
        nodes.append(FreeNode(f"n{index}", draw(_node_partitions), free, draw(_node_mem_gib), gpu_count))
    return make_request(jobs, nodes, max_group_size=draw(_group_sizes), same_user=draw(_same_user))


def decided_ids(plan: Plan) -> list[int]:
    ids = [job_id for group in plan.groups for job_id in group.members]
    return ids + [item.job_id for item in (*plan.solo, *plan.sharers, *plan.waiting)]


def make_cluster_node(name, gpu_count=4, islands=2, **changes):
    """An idle node with known topology: its GPUs in islands of equal size."""
    size = gpu_count // islands
    topology = tuple(tuple(range(start, start + size)) for start in range(0, gpu_count, size))
    return make_node(name, gpu_count, **({"gpu_count": gpu_count, "islands": topology, "topology": topology} | changes))


def members_of(item):
    """The jobs of a group, or the one of a solo or sharer."""
    return item.members if isinstance(item, Group) else (item.job_id,)


def given_of(plan, item):
    """CPUs and memory that the members of a group, solo or sharer get, by job id."""
    return {job_id: plan.cpu_mem_shares[job_id] for job_id in members_of(item) if job_id in plan.cpu_mem_shares}


def feed_back(request: PlanRequest, plan: Plan, *, new_jobs=(), **changes) -> PlanRequest:
    """The request of the next cycle if the plan was carried out and nothing else happened but new jobs."""
    jobs = {job.job_id: job for job in all_jobs(request)}
    running = tuple(
        Running(
            tuple(jobs[job_id] for job_id in members_of(item)),
            item.gpus,
            given_of(plan, item),
            getattr(item, "accumulate_steps", 1),
        )
        for item in (*plan.groups, *plan.solo, *plan.sharers)
        if item.gpus
    )
    nodes = tuple(_beside(node, request.running, running, plan) for node in request.nodes)
    waiting = (*(jobs[item.job_id] for item in plan.waiting), *new_jobs)
    return dataclasses.replace(request, jobs=waiting, running=running, nodes=nodes, **changes)


def _beside(node, before, running, plan):
    """A node with the resources that are left beside what runs now, in place of what ran before."""
    held = [share for unit in running for share in unit.gpus if share.node == node.name]
    taken = {gpu for share in held for gpu in share.gpu_ids}
    islands = [tuple(gpu for gpu in island if gpu not in taken) for island in node.topology]
    earlier = sum(share.gpu_count for unit in before for share in unit.gpus if share.node == node.name)
    counted = node.free_gpus + earlier - sum(share.gpu_count for share in held)
    given = [share for shares in plan.cpu_mem_shares.values() for share in shares if share.node == node.name]
    return dataclasses.replace(
        node,
        free_gpus=sum(map(len, islands)) if node.topology else counted,
        islands=tuple(filter(None, islands)),
        free_cpus=max(0.0, node.cpu_count - sum(share.cpus for share in given)),
        free_mem_gib=max(0.0, node.mem_gib - sum(share.mem_gib for share in given)),
    )


def shuffled(request: PlanRequest, rng) -> PlanRequest:
    """The same request, its jobs, nodes and running units in another order."""
    parts = {name: list(getattr(request, name)) for name in ("jobs", "nodes", "running")}
    for part in parts.values():
        rng.shuffle(part)
    return dataclasses.replace(request, **{name: tuple(part) for name, part in parts.items()})


_job_counts = st.integers(1, 14)
_costs_s = st.sampled_from((0.0, 0.0, 30.0, 400.0))
_cluster_gpu_counts = st.sampled_from((1, 1, 1, 2, 2, 4, 8))
_cluster_node_gpus = st.sampled_from((2, 4, 4))
_main_or_debug = st.sampled_from(("main", "debug"))
_more_partitions = st.lists(st.sampled_from((("main",), ("debug",), ("main", "debug"))), max_size=3)
_either = st.booleans()


@st.composite
def cluster_requests(draw, *, preemptible=True, restart_s=True):
    """Jobs on an idle cluster of known topology, to be planned over several cycles."""
    jobs = [
        dataclasses.replace(
            draw(pending_jobs(job_id)),
            partition=draw(_main_or_debug),
            gpu_count=draw(_cluster_gpu_counts),
            preemptible=draw(_either) if preemptible is None else preemptible,
            restart_s=draw(_costs_s) if restart_s else 0.0,
        )
        for job_id in range(1, draw(_job_counts) + 1)
    ]
    nodes = [
        make_cluster_node(f"n{index}", draw(_cluster_node_gpus), partitions=partitions, gpu_mem_gib=draw(_node_mem_gib))
        for index, partitions in enumerate([("main", "debug"), *draw(_more_partitions)])
    ]
    capacity = {name: sum(node.gpu_count for node in nodes if name in node.partitions) for name in ("main", "debug")}
    return make_request(
        [job for job in jobs if job.gpu_count <= capacity[job.partition]],
        nodes,
        larger_than_a_node="whole-nodes",
        max_group_size=draw(_group_sizes),
        same_user=draw(_either),
    )


SPEEDS = {("a", "a"): (0.7, 0.7), ("a", "b"): (0.9, 0.8), ("a", "c"): (0.6, 0.3), ("b", "b"): (0.45, 0.45),
          ("b", "c"): (0.95, 0.55)}  # c beside c was never measured  # fmt: skip
PAIRS = InterferenceTable(tuple(PairSpeed(*pair, *speeds) for pair, speeds in SPEEDS.items()))


def batch_of(batch_size=16, max_steps=16, **changes):
    fields = {"fixed_mem_gib": 2.0, "mem_gib_per_sample": 0.5, "max_accumulate_steps": max_steps}
    return BatchModel(batch_size, 0.1, 0.05, **(fields | changes))


_uses = st.none() | st.sampled_from((0.0, 0.1, 0.4, 0.9, 1.0))
_batches = st.sampled_from((None, batch_of(max_steps=8)))
_models = st.sampled_from(("a", "b", "c", "a", "b"))
_larger = st.sampled_from(("slurm", "whole-nodes"))
_promises = st.sampled_from((0.0, 0.0, 0.0, 0.0, 0.5, 0.8))
_shared_mem_gib = st.sampled_from((0.0, 3.0, 3.0, 7.0, 20.0))  # the largest fits no GPU of known memory
_shared_node_gib = st.sampled_from((0.0, 8.0, 12.0))
_shared_sizes = st.sampled_from((4, 4, 3, 2, 1))
_mostly_alice = st.sampled_from(("alice", "alice", "alice", "bob"))


@st.composite
def shared_requests(draw):
    """The same with all that policies ask for which put jobs beside others."""
    request = draw(cluster_requests(preemptible=None))
    jobs = []
    for job in request.jobs:
        profile, model = job.profile, draw(_models)
        if profile is not None:
            key = dataclasses.replace(profile.key, model=model)
            profile = dataclasses.replace(profile, key=key, gpu_mem_gib=draw(_shared_mem_gib))
        changes = {"gpu_utilization": draw(_uses), "batch": draw(_batches), "min_speed": draw(_promises)}
        # Mostly one user's jobs of one partition and of known duration, or hardly any two could share.
        fits = job.gpu_count <= request.nodes[0].gpu_count
        alike = {"user": draw(_mostly_alice), "partition": "main"} if fits and draw(_mostly_true) else {}
        remaining_s = draw(_amounts) if draw(_mostly_true) else None
        jobs.append(dataclasses.replace(job, profile=profile, remaining_s=remaining_s, **changes, **alike))
    nodes = tuple(dataclasses.replace(node, gpu_mem_gib=draw(_shared_node_gib)) for node in request.nodes)
    frame = {"larger_than_a_node": draw(_larger), "whole_sets_only": draw(_either), "interference": PAIRS}
    return dataclasses.replace(request, jobs=tuple(jobs), nodes=nodes, max_group_size=draw(_shared_sizes), **frame)


MERGING = ({}, {"grouping": "optimal"}, {"merge": "whole-rounds"}, {"matching": "priority-order"})


def company(plan):
    """The sizes of groups, and how many jobs are on each GPU that several are on."""
    on_gpu = Counter((share.node, gpu) for item in plan.sharers for share in item.gpus for gpu in share.gpu_ids)
    return [len(group.members) for group in plan.groups] + [count for count in on_gpu.values() if count > 1]


def check_plan(request: PlanRequest, plan: Plan, *, most=4, preemption=True, min_speed=0.0):
    """What every plan keeps: each job is decided on once, its GPUs are there, and who shares or runs may."""
    jobs = {job.job_id: job for job in all_jobs(request)}
    placed = (*plan.groups, *plan.solo, *plan.sharers)
    assert sorted(decided_ids(plan)) == sorted(jobs)
    for decision in (*placed, *plan.waiting):
        assert decision.reasons and all(str(reason).strip() for reason in decision.reasons)
    for node in request.nodes:
        _check_node(node, request, placed)
    for group in plan.groups:
        members = [jobs[job_id] for job_id in group.members]
        assert len(members) > 1 and {job.gpu_count for job in members} == {group.gpu_count}
        assert all(job.profile is not None for job in members)
        assert set(group.speed) == set(group.members) and sum(group.speed.values()) > 1
    for item in placed:
        job = jobs[members_of(item)[0]]
        assert not item.gpus or sum(share.gpu_count for share in item.gpus) == job.gpu_count
        assert job.node_count == 1 or len(item.gpus) in {0, job.node_count}
    assert all(0 < sharer.speed <= 1 for sharer in plan.sharers)
    _check_company(request, plan, jobs, min(most, request.max_group_size))
    _check_promises(plan, jobs, min_speed)
    _check_running(request, plan, placed, preemption=preemption)


def _check_node(node, request, placed):
    """No GPU is given out twice, but to sharers, and none that the node does not have for these jobs."""
    partition = {job.job_id: job.partition for job in all_jobs(request)}
    mine = [(item, share) for item in placed for share in item.gpus if share.node == node.name]
    assert {partition[job_id] for item, _ in mine for job_id in members_of(item)} <= set(node.partitions)
    if known := {gpu for island in node.topology for gpu in island}:
        assert all(len(set(share.gpu_ids)) == len(share.gpu_ids) == share.gpu_count for _, share in mine)
        assert {gpu for _, share in mine for gpu in share.gpu_ids} <= known
    own = [share for item, share in mine if not isinstance(item, Sharer)]
    gpu_ids = [gpu for share in own for gpu in share.gpu_ids]
    assert len(set(gpu_ids)) == len(gpu_ids)
    before = sum(share.gpu_count for unit in request.running for share in unit.gpus if share.node == node.name)
    assert sum(share.gpu_count for share in own) <= node.free_gpus + before


def _check_company(request, plan, jobs, most):
    """Jobs on the same GPUs are of one bucket, no more than they may be, and fit the memory."""
    gpu_mem_gib = {node.name: node.gpu_mem_gib for node in request.nodes}
    tenants = {(share.node, group.members): [group] for group in plan.groups for share in group.gpus}
    for sharer in plan.sharers:
        for place in ((share.node, gpu) for share in sharer.gpus for gpu in share.gpu_ids):
            tenants.setdefault(place, []).append(sharer)
    for (node, _), items in tenants.items():
        members = [jobs[job_id] for item in items for job_id in members_of(item)]
        if len(members) < 2:
            continue
        assert len(members) <= most
        assert all(job.groupable and job.largest_group >= len(members) for job in members)
        assert len({(job.domain, job.partition, job.user if request.same_user else "") for job in members}) == 1
        steps = {item.job_id: item.accumulate_steps for item in items if isinstance(item, Sharer)}
        needed_gib = sum(mem_gib_of(job, steps[job.job_id]) if steps else job.profile.gpu_mem_gib for job in members)
        assert not gpu_mem_gib[node] or needed_gib <= gpu_mem_gib[node]
        assert not request.whole_sets_only or len({item.gpus for item in items}) == 1


def _check_promises(plan, jobs, min_speed):
    """No job is newly put beside others, or joined by others, at less than its minimum speed or the site's."""
    tenants = {}
    for item in plan.sharers:
        for place in ((share.node, gpu) for share in item.gpus for gpu in share.gpu_ids):
            tenants.setdefault(place, []).append(item)
    speeds = [pair for group in plan.groups if not group.kept for pair in group.speed.items()]
    for items in tenants.values():
        if len(items) > 1 and not all(item.kept for item in items):
            speeds += [(item.job_id, item.speed) for item in items]
    assert all(speed >= max(jobs[job_id].min_speed, min_speed) - 1e-9 for job_id, speed in speeds)


def _check_running(request, plan, placed, *, preemption):
    """Kept units run as before, units that cannot be stopped are kept or joined, only running ones are stopped."""
    units = {frozenset(job.job_id for job in unit.members): unit for unit in request.running}
    stays = set()
    for item in placed:
        joining = getattr(item, "joining", ())
        if item.kept:
            unit = units[frozenset(members_of(item))]
            expected = (unit.gpus, unit.cpu_mem_shares, unit.accumulate_steps)
            assert (item.gpus, given_of(plan, item), getattr(item, "accumulate_steps", 1)) == expected
        if item.kept or joining:
            stays.add(frozenset(members_of(item)) - {*joining})
    assert all(members in stays for members, unit in units.items() if not (unit.preemptible and preemption))
    running = {job_id for members in units for job_id in members}
    assert all(item.preempted == (item.job_id in running) for item in plan.waiting)


NOW_S = 1000.0
KEYS = ("submit_s", "gpu_count", "attained_gpu_s", "remaining_s")

# The clock shows 1000 s. What follows from each line:
#
#        submitted GPUs attained remaining |          whole      rem.   GPU-s  ρ = (waited + remaining)
#            at s         GPU-s      s     | att. s    s         × GPUs  att.     / whole
QUEUE = {  #                              |
    1: (10.0, 1, 150.0, 400.0),  #        |  150     550        400     150   1390 / 550 = 2.53
    2: (0.0, 2, 600.0, 50.0),  #          |  300     350        100     600   1050 / 350 = 3.00
    3: (20.0, 1, 100.0, 90.0),  #         |  100     190         90     100   1070 / 190 = 5.63
    4: (900.0, 4, 240.0, 30.0),  #        |   60      90        120     240    130 /  90 = 1.44
}


def queue(figures=QUEUE, **changes):
    return [make_job(number, **dict(zip(KEYS, values, strict=True)), **changes) for number, values in figures.items()]


def order(policy, jobs, **changes):
    """The jobs as the policy ranks them: on a full cluster all wait in that order."""
    plan = policy.plan(make_request(jobs, [make_node("n1", 0, gpu_count=8)], now_s=NOW_S, **changes))
    assert not plan.groups
    assert not plan.solo
    return [item.job_id for item in plan.waiting]


def tiresias(name="tiresias", **options):
    return get_policy(name, {"queue_limits_gpu_s": (200.0, 500.0), "promote_after": math.inf} | options)
