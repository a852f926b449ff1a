"""`muri-hybrid`: how each group shares, and its CPUs and memory."""

import dataclasses

import pytest
from host_builders import HUNGRY, MODEST, host_requests, make_host
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_builders import (
    KINDS,
    all_jobs,
    decided_ids,
    feed_back,
    make_job,
    make_node,
    make_profile,
    make_request,
    requests,
)

from muri.policies.cycle.queue import worth_of
from muri.policies.registry import get_policy
from muri.policies.speed import Fair
from muri.policies.traits import Demand, InterferenceTable, PairSpeed
from muri.policies.types import CpuMemShare, NodeShare, Running, sentences
from muri_lab.policies.hybrid.policy import MuriHybrid, ways_of
from muri_lab.policies.hybrid.prediction import Predictor

SIMULATED = {"larger_than_a_node": "whole-nodes"}
FULL = {"gpu": (0.0, 0.0, 1.0, 0.0), "cpu": (0.0, 1.0, 0.0, 0.0), "storage": (1.0, 0.0, 0.0, 0.0)}


def full(job_id, resource, remaining_s=3600.0, **changes):
    """A job that needs one resource all the time; its worth is one per remaining GPU-hour."""
    profile = make_profile(FULL[resource], model=changes.pop("model", resource))
    return make_job(job_id, None, profile=profile, remaining_s=remaining_s, preemptible=True, **changes)


def table(*rows):
    return InterferenceTable(tuple(PairSpeed(*row) for row in rows))


def by_job(plan):
    return {job_id: [(share.cpus, share.mem_gib) for share in shares] for job_id, shares in plan.cpu_mem_shares.items()}


def test_interleaving_wins_where_members_need_different_resources():
    jobs = (full(1, "gpu"), full(2, "cpu", 7200.0))
    choice = ways_of(jobs, Predictor(Fair(), table(("cpu", "gpu", 0.8, 0.9))))
    # Worth 1 and 1/2: both at full speed, against 0.9 + 0.8/2, against the first alone.
    assert [choice.interleave.value, choice.plain.value, choice.alone.value] == pytest.approx([1.5, 1.3, 1.0])
    assert choice.best == choice.interleave


def test_plain_sharing_wins_where_measured_to_be_faster_than_turns():
    jobs = (full(1, "gpu", model="a"), full(2, "gpu", model="b"))
    choice = ways_of(jobs, Predictor(Fair(), table(("a", "b", 0.7, 0.8))))
    assert [choice.interleave.value, choice.plain.value, choice.alone.value] == pytest.approx([1.0, 1.5, 1.0])
    assert choice.best == choice.plain


def test_the_best_two_of_three_share_plainly_where_all_three_would_be_slower():
    jobs = tuple(full(index, "gpu", model=model) for index, model in enumerate("abc"))
    pairs = table(("a", "b", 0.9, 0.9), ("a", "c", 0.3, 0.3), ("b", "c", 0.4, 0.4))
    best = ways_of(jobs, Predictor(Fair(), pairs)).best
    assert (best.name, [job.job_id for job in best.members], best.value) == ("plain", [0, 1], pytest.approx(1.8))
    # All three: 0.9 × 0.3 + 0.9 × 0.4 + 0.3 × 0.4 = 0.75, while turns reach 1.
    assert ways_of(jobs, Predictor(Fair(), pairs), may_leave_out=False).best.name == "interleave"


def test_no_way_is_chosen_that_breaks_a_promise():
    jobs = tuple(full(index, "gpu", model=model, min_speed=0.6) for index, model in enumerate("ab"))
    choice = ways_of(jobs, Predictor(Fair(), table(("a", "b", 0.55, 0.95))))
    assert choice.plain.value > choice.alone.value
    assert choice.best == choice.alone


def test_the_most_worthwhile_runs_alone_where_both_need_the_same_and_one_is_nearly_done():
    jobs = (full(1, "gpu", 36_000.0), full(2, "gpu", 360.0))
    choice = ways_of(jobs, Predictor(Fair(), table(("gpu", "gpu", 0.6, 0.6))))
    # Worth 0.1 and 10: half speed for both, 0.6 for both, or the second alone.
    assert [choice.interleave.value, choice.plain.value, choice.alone.value] == pytest.approx([5.05, 6.06, 10.0])
    assert choice.best.members == (jobs[1],)
    assert ways_of(jobs, Predictor(Fair(), None)).plain is None


def test_a_group_of_the_plan_says_how_it_shares_and_with_what_value():
    jobs = [full(1, "gpu", model="a"), full(2, "gpu", model="b")]
    request = make_request(jobs, [make_node("n1", 1)], interference=table(("a", "b", 0.7, 0.8)))
    plan = MuriHybrid().plan(request)
    (group,) = plan.groups
    assert (group.mode, group.speed) == ("plain", {1: 0.7, 2: 0.8})
    said = "weighted speed: interleaved 1, plainly shared 1.5, alone 1: they share without turns"
    assert said in sentences(group.reasons)
    assert get_policy("muri-jct").plan(request).groups == ()
    # It goes on so, once it runs.
    running = (Running(tuple(jobs), group.gpus, mode="plain"),)
    after = MuriHybrid().plan(make_request([], [make_node("n1", 0)], running=running))
    assert [(item.mode, item.kept) for item in after.groups] == [("plain", True)]


@pytest.mark.parametrize(("changes", "way"), [({}, "alone"), (SIMULATED, "plain")])
def test_on_slurm_jobs_on_several_gpus_never_share_plainly(changes, way):
    jobs = [full(1, "gpu", model="a", gpu_count=2), full(2, "gpu", model="b", gpu_count=2)]
    request = make_request(jobs, [make_node("n1", 2)], interference=table(("a", "b", 0.7, 0.8)), **changes)
    plan = MuriHybrid().plan(request)
    assert [group.mode for group in plan.groups] == (["plain"] if way == "plain" else [])
    assert len(plan.solo) == (way == "alone")


def hungry(job_id, **changes):
    return full(job_id, "cpu", sensitivity=HUNGRY, **changes)


def modest(job_id, **changes):
    return full(job_id, "gpu", sensitivity=MODEST, **changes)


def test_those_who_need_less_give_up_the_rest_to_those_who_gain():
    request = make_request([hungry(1), modest(2), modest(3), modest(4)], [make_host("n1")])
    plan = MuriHybrid().plan(request)
    # Of 12 CPUs, 3 for each GPU, the modest use one each; the hungry one gains nothing from more than 6.
    assert by_job(plan) == {1: [(6.0, 10.0)], 2: [(1.0, 10.0)], 3: [(1.0, 10.0)], 4: [(1.0, 10.0)]}
    why = sentences(plan.solo[0].reasons)
    assert "total speed 2.00, where the GPU-proportional share gives 1.00" in why
    assert MuriHybrid().plan(feed_back(request, plan)).solo == tuple(
        dataclasses.replace(solo, kept=True, reasons=found.reasons)
        for solo, found in zip(plan.solo, MuriHybrid().plan(feed_back(request, plan)).solo, strict=True)
    )


def test_what_is_left_goes_where_a_second_of_work_is_worth_most():
    nearly_done = hungry(1, remaining_s=600.0)
    plan = MuriHybrid().plan(make_request([hungry(2), nearly_done, modest(3), modest(4)], [make_host("n1", cpus=12.0)]))
    assert (by_job(plan)[1][0][0], by_job(plan)[2][0][0]) == (6.0, 4.0)


def test_a_newcomer_gets_its_share_back_from_who_had_more():
    first = make_request([hungry(1)], [make_host("n1", gpus=2, cpus=6.0, mem_gib=120.0)], **SIMULATED)
    plan = MuriHybrid().plan(first)
    assert by_job(plan) == {1: [(6.0, 10.0)]}
    after = MuriHybrid().plan(feed_back(first, plan, new_jobs=(hungry(2),)))
    assert {job_id: shares[0][0] for job_id, shares in by_job(after).items()} == {1: 3.0, 2: 3.0}
    assert [solo.kept for solo in after.solo] == [False, False]
    assert any("a newcomer needs" in line for line in sentences(after.solo[0].reasons))


def test_what_cannot_be_stopped_gets_no_more_than_its_share():
    request = make_request([hungry(1), modest(2)], [make_host("n1", gpus=2, cpus=6.0)])
    fixed = dataclasses.replace(
        request, jobs=tuple(dataclasses.replace(job, preemptible=False) for job in request.jobs)
    )
    assert by_job(MuriHybrid().plan(request))[1][0][0] == 5.0
    assert by_job(MuriHybrid().plan(fixed)).get(1, [(3.0, 0.0)])[0][0] == 3.0


def test_all_of_a_group_s_share_is_the_last_member_s_so_that_nothing_is_lost():
    jobs = [full(1, "gpu", 3600.0, sensitivity=MODEST), full(2, "storage", 7200.0, sensitivity=MODEST)]
    plan = MuriHybrid().plan(make_request(jobs, [make_host("n1", gpus=1, cpus=3.0, mem_gib=60.0)]))
    assert [group.members for group in plan.groups] == [(1, 2)]
    assert by_job(plan) == {1: [(0.0, 0.0)], 2: [(1.0, 20.0)]}


@st.composite
def profiled(draw):
    """Requests with CPUs and memory, whose jobs can be grouped."""
    request, later = draw(host_requests())
    kinds = st.sampled_from(list(KINDS))

    def known(job):
        kind = draw(kinds)
        return dataclasses.replace(job, profile=make_profile(KINDS[kind], model=kind))

    found = table(("cpu", "cpu", 0.9, 0.9), ("cpu", "gpu", 0.7, 1.0), ("gpu", "gpu", 0.4, 0.4))
    request = dataclasses.replace(
        request,
        jobs=tuple(known(job) for job in request.jobs),
        interference=draw(st.sampled_from((None, found))),
        same_user=draw(st.booleans()),
        larger_than_a_node=draw(st.sampled_from(("slurm", "whole-nodes"))),
    )
    return request, tuple(known(job) for job in later)


def check_shares(request, plan):
    """Nothing is given out twice, and no started unit is predicted slower than with the proportional share.

    A job that joins a unit takes it as it is: no running member is disturbed.

    On Slurm, no running unit gives back more than its share. Where that is missing, a unit that starts asks for its
    proportional share, and Slurm lets it wait.
    """
    jobs = {job.job_id: job for job in all_jobs(request)}
    nodes = {node.name: node for node in request.nodes}
    units = [(group.members, group.gpus, group) for group in plan.groups]
    units += [((solo.job_id,), solo.gpus, solo) for solo in plan.solo if solo.gpus]
    given = {name: [0.0, 0.0] for name in nodes}
    proportional = dict.fromkeys(nodes, request.running != () and request.larger_than_a_node == "slurm")
    for members, gpus, decision in units:
        told = [share for member in members for share in plan.cpu_mem_shares.get(member, ())]
        for share in gpus:
            node = nodes[share.node]
            fair = [part / node.gpu_count * share.gpu_count for part in (node.cpu_count, node.mem_gib)]
            mine = [item for item in told if item.node == share.node]
            amounts = [sum(item.cpus for item in mine), sum(item.mem_gib for item in mine)] if mine else fair
            given[share.node] = [sum(pair) for pair in zip(given[share.node], amounts, strict=True)]
            if mine and not decision.kept and not getattr(decision, "joining", ()):
                proportional[share.node] = False
                _check_speeds(request, [jobs[member] for member in members], decision, amounts, node, share.gpu_count)
    for name, amounts in given.items():
        limits = (nodes[name].cpu_count, nodes[name].mem_gib)
        fit = all(not limit or amount <= limit + 1e-6 for amount, limit in zip(amounts, limits, strict=True))
        assert fit or proportional[name]


def _check_speeds(request, jobs, decision, amounts, node, gpus):
    fair = Demand(node.cpu_count / node.gpu_count, node.mem_gib / node.gpu_count)
    predictor = Predictor(Fair(), request.interference)
    mode = getattr(decision, "mode", "interleave")
    own, usual = predictor.speeds(jobs, mode, [Demand(*(amount / gpus for amount in amounts)), fair], fair)
    assert all(now >= before - 1e-6 for now, before in zip(own, usual, strict=True))
    assert all(job.preemptible or amounts[0] <= fair.cpus * gpus + 1e-6 for job in jobs)


def _with_proportional(request):
    """Units that were told no share hold as much of their nodes' CPUs and memory as of the GPUs."""
    nodes = {node.name: node for node in request.nodes}
    for unit in request.running:
        for share in unit.gpus if not any(unit.cpu_mem_shares.values()) else ():
            node = nodes[share.node]
            part = share.gpu_count / node.gpu_count
            free = (node.free_cpus - node.cpu_count * part, node.free_mem_gib - node.mem_gib * part)
            nodes[share.node] = dataclasses.replace(node, free_cpus=max(0.0, free[0]), free_mem_gib=max(0.0, free[1]))
    return dataclasses.replace(request, nodes=tuple(nodes.values()))


@settings(max_examples=75)
@given(profiled())
def test_cpus_and_memory_are_never_exceeded_and_nobody_is_below_the_proportional_share(found):
    request, later = found
    policy = MuriHybrid()
    plan = policy.plan(request)
    assert sorted(decided_ids(plan)) == sorted(job.job_id for job in request.jobs)
    check_shares(request, plan)
    assert policy.plan(dataclasses.replace(request, jobs=request.jobs[::-1], nodes=request.nodes[::-1])) == plan
    following = _with_proportional(feed_back(request, plan, new_jobs=later))
    modes = {group.members: group.mode for group in plan.groups}
    running = tuple(
        dataclasses.replace(unit, mode=modes.get(tuple(job.job_id for job in unit.members), "interleave"))
        for unit in following.running
    )
    following = dataclasses.replace(following, running=running)
    after = policy.plan(following)
    assert sorted(decided_ids(after)) == sorted(job.job_id for job in all_jobs(following))
    check_shares(following, after)


@given(requests())
def test_where_nothing_is_known_it_plans_as_muri_jct(request_):
    plan, plain = MuriHybrid().plan(request_), get_policy("muri-jct").plan(request_)
    assert plan.cpu_mem_shares == {}
    jobs = {job.job_id: job for job in request_.jobs}
    alone = [
        group
        for group in plain.groups
        if sum(worth_of(jobs[member]) * speed for member, speed in group.speed.items())
        < max(worth_of(jobs[member]) for member in group.members) * (1 - 1e-9)
    ]
    kept = [group for group in plain.groups if group not in alone]
    assert [(group.members, group.gpus, group.mode) for group in plan.groups] == [
        (group.members, group.gpus, "interleave") for group in kept
    ]
    if not alone:
        assert [(solo.job_id, solo.gpus) for solo in plan.solo] == [(solo.job_id, solo.gpus) for solo in plain.solo]
        assert plan.waiting == plain.waiting


def test_on_slurm_what_runs_keeps_its_share_and_idle_gpus_keep_theirs():
    node = make_host("n1", gpus=2, cpus=6.0, mem_gib=120.0, free_gpus=1, free_cpus=1.0, free_mem_gib=60.0)
    rich = Running((hungry(1),), (NodeShare("n1", 1),), {1: (CpuMemShare("n1", 5.0, 60.0),)})
    plan = MuriHybrid().plan(make_request([hungry(2)], [node], running=(rich,)))
    assert [solo.kept for solo in plan.solo] == [True, False]
    assert by_job(plan) == {1: [(5.0, 60.0)]}
    idle = MuriHybrid().plan(make_request([hungry(1)], [make_host("n1", gpus=2, cpus=6.0)]))
    assert by_job(idle)[1][0][0] == 3.0


def test_cpus_that_become_free_go_to_what_runs_where_they_pay_for_the_restart():
    node = make_host("n1", gpus=2, cpus=6.0, mem_gib=120.0, free_gpus=1, free_cpus=3.0, free_mem_gib=60.0)
    for restart_s, cpus in ((30.0, 6.0), (600.0, None)):
        # Twice as fast for 360 s gains 360 s of work; a restart loses its own length.
        unit = Running((hungry(1, restart_s=restart_s),), (NodeShare("n1", 1),))
        request = make_request([], [node], running=(unit,), **SIMULATED)
        plan = MuriHybrid().plan(request)
        assert {job_id: shares[0][0] for job_id, shares in by_job(plan).items()} == ({1: cpus} if cpus else {})
        assert plan.solo[0].kept == (cpus is None)
        after = MuriHybrid().plan(feed_back(request, plan))
        assert [solo.kept for solo in after.solo] == [True]
