"""Members keep their CPUs and memory and share CPUs where Slurm lets them; their GPUs are opened by a word."""

from dataclasses import replace
from typing import Any

import pytest
from at_work import HOUR_S, behind_pilot, candidate, decided, of_kind
from fake_slurm import (
    FOUR_KINDS,
    NOW_S,
    FakeSlurm,
    behind_license,
    four_jobs,
    make_job,
    make_node,
    one_cycle,
    pilots,
    run_cycles,
)

from muri.profiler.records import ProfileDetail
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.execute.gate import drain
from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.planning.actions import Join, MemberPlan, ReleaseSolo, StartGroup
from muri.slurm_plugin.planning.decision import Decision
from muri.slurm_plugin.planning.slurm_requests import (
    GroupPlace,
    asked_by,
    member_change,
    original_request,
    pilot_job,
    was_changed,
)
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobChange, JobState
from muri.slurm_plugin.records.limits import (
    NO_LIMITS,
    Association,
    Limits,
    PartitionLimits,
    Qos,
    SiteLimits,
    Tres,
)
from muri.slurm_plugin.records.roles import Role, read_job

GIB = 1024
SHARED = SiteLimits(partitions=(PartitionLimits("main", oversubscribe=4),))
PLACE = GroupPlace(9, "n1", ("they fit",))


def planned(job: Job, **changes: Any) -> MemberPlan:
    return MemberPlan(**{"job_id": job.job_id, "original": asked_by(job), "solo_iteration_s": 1.0, "speed": 0.9,
                         "time_limit_s": 2 * HOUR_S, "cpu_count": job.given_cpus, **changes})  # fmt: skip


def changed(job: Job, place: GroupPlace = PLACE, **plan: Any) -> JobChange:
    return member_change(planned(job, **plan), place, job, no_gpus="gres/gpu:0")


# The change of a job's request, and the way back


def test_a_member_loses_its_gpus_and_nothing_else():
    change = changed(make_job(1, cpu_count=8, cpus_per_task=4, mem_per_node_mib=8 * GIB))
    assert (change.cpu_count, change.cpus_per_task, change.mem_per_node_mib, change.oversubscribe) == (None,) * 4
    assert (change.gpu_request, change.required_nodes, change.dependency) == ("gres/gpu:0", "n1", "after:9")
    assert tags.token(change.admin_comment, tags.GRANT_PREFIX) == "9"


def test_a_thread_is_cut_because_its_pilot_does_its_work():
    change = changed(make_job(1, mem_per_node_mib=8 * GIB), isolation="thread", cpu_count=1)
    assert (change.cpu_count, change.cpus_per_task, change.mem_per_node_mib) == (1, 1, 512)
    assert tags.token(change.admin_comment, tags.GRANT_PREFIX) == "9"


def test_cpus_that_come_with_its_gpus_are_asked_for_by_their_number():
    two_tasks = make_job(1, gpu_count=2, cpu_count=2, cpus_per_task=1, cpus_per_gpu=6)
    change = changed(two_tasks)
    assert (change.cpu_count, change.cpus_per_task) == (12, 6)
    assert (
        changed(two_tasks, cpu_count=1).cpu_count == 12
    )  # an older journal counts the CPUs of a member's script alone


def test_memory_that_comes_with_its_gpus_is_asked_for_by_its_amount():
    jobs = [
        make_job(1, mem_per_node_mib=mib, mem_per_cpu_mib=per_cpu) for mib, per_cpu in ((3000, 0), (3000, 750), (0, 0))
    ]
    changes = [member_change(planned(job), PLACE, job, no_gpus="gres/gpu:0", mem_per_gpu=True) for job in jobs]
    assert [change.mem_per_node_mib for change in changes] == [3000, None, None]


def test_a_site_with_a_default_for_each_gpu_gives_members_their_memory(make_controller):
    slurm = FakeSlurm(four_jobs(mem_per_node_mib=3000)[:2], [make_node("n1", gpu_count=1)])
    slurm.limits = SiteLimits(partitions=(PartitionLimits("main", mem_per_gpu=True),))
    told: list[int | None] = []
    modify = slurm._modify
    slurm._modify = lambda job_id, change: (told.append(change.mem_per_node_mib), modify(job_id, change))[1]
    one_cycle(make_controller, slurm)
    assert [mib for mib in told if mib] == [3000, 3000]


@pytest.mark.parametrize(
    ("own", "group", "told"), [(False, True, True), (True, True, None), (False, False, None), (True, False, None)]
)
def test_that_it_shares_cpus_is_told_and_never_taken_back(own, group, told):
    """Slurm cannot; and a job that has got it is not taken for one that its user has changed."""
    job = make_job(1, oversubscribe=own)
    change = changed(job, replace(PLACE, oversubscribe=group))
    assert change.oversubscribe is told
    at_work = read_job(replace(job, oversubscribe=group, admin_comment=change.admin_comment))
    assert original_request(at_work).oversubscribe is None
    assert not was_changed(read_job(replace(job, oversubscribe=not own)), planned(job))


def test_with_its_state_a_job_loses_the_word_that_opens_a_pilots_gpus():
    job = make_job(1)
    member = read_job(replace(job, admin_comment=changed(job).admin_comment))
    own = original_request(member, "its group has ended")
    assert tags.GRANT_PREFIX not in own.admin_comment
    assert tags.STATE_PREFIX not in own.admin_comment
    left_over = read_job(replace(job, admin_comment=f"muri:model=m1 {tags.GRANT_PREFIX}9 of others"))
    assert original_request(left_over).admin_comment == "muri:model=m1 of others"
    assert original_request(read_job(job)).admin_comment is None


@pytest.mark.parametrize("way", ["restored", "drained", "refused"])
def test_wherever_a_member_is_put_back_the_word_goes(make_controller, way, monkeypatch):
    slurm = FakeSlurm([candidate(1), candidate(2, "m2")], [make_node("n1", gpu_count=1)])
    if way == "refused":
        modify = slurm._modify

        def refuse(job_id: int, change: JobChange) -> None:
            modify(job_id, change)
            if job_id == 2 and change.gpu_request == "gres/gpu:0":
                raise GatewayError("Invalid generic resource (gres) specification")

        monkeypatch.setattr(slurm, "_modify", refuse)
    one_cycle(make_controller, slurm)
    (pilot,) = pilots(slurm)
    words = {number: tags.token(slurm.jobs[number].admin_comment, tags.GRANT_PREFIX) for number in (1, 2)}
    assert words == {1: str(pilot.job_id), 2: None if way == "refused" else str(pilot.job_id)}
    if way == "restored":
        slurm.end(pilot.job_id, state=JobState.FAILED)
        one_cycle(make_controller, slurm)
    elif way == "drained":
        drain(slurm, slurm.snapshot)
    if way != "refused":
        assert not any(tags.GRANT_PREFIX in slurm.jobs[number].admin_comment for number in (1, 2))
        assert [asked_by(slurm.jobs[number]) for number in (1, 2)] == [asked_by(candidate(1)), asked_by(candidate(2))]


# Which groups share CPUs


def kinds(decision: Decision) -> list[bool]:
    """Whether the groups that start share CPUs, in their order."""
    return [start.oversubscribe for start in of_kind(decision, StartGroup)]


def running(job_id: int, node: str = "n1", **changes: Any) -> Job:
    """Another user's job."""
    return make_job(
        job_id, **{"user": "bob", "uid": 1002, "state": JobState.RUNNING, "held": False, "reason": "", "nodes": node,
                   "start_s": NOW_S - 60, "admin_comment": "", **changes}
    )  # fmt: skip


def pair(cpus: int = 4, **changes: Any) -> list[Job]:
    return [candidate(1, "m1", cpu_count=cpus, **changes), candidate(2, "m2", cpu_count=cpus, **changes)]


def test_where_the_partition_allows_it_jobs_share_their_cpus():
    node = make_node("n1", cpu_count=4, gpu_count=1)
    found = decided(pair(), [node], limits=SHARED)
    (start,) = of_kind(found, StartGroup)
    assert (start.oversubscribe, len(start.members)) == (True, 2)
    assert pilot_job(start, "t", Config()).oversubscribe
    assert not of_kind(decided(pair(), [node]), StartGroup)


@pytest.mark.parametrize(
    ("cpus", "shares"),
    [
        pytest.param(34, False, id="a full group has CPUs of its own on the GPU's part of the node"),
        pytest.param(32, True, id="one of four would miss a CPU there"),
    ],
)
def test_jobs_share_cpus_only_where_a_full_group_needs_it(cpus: int, shares: bool):
    assert kinds(decided(pair(), [make_node("n1", cpu_count=cpus, gpus_allocated=1)], limits=SHARED)) == [shares]


def test_beside_an_ordinary_job_cpus_add_up():
    node = make_node("n1", cpu_count=32, gpus_allocated=1, cpus_allocated=4)
    for changes, shares in (({}, False), ({"oversubscribe": True}, True)):
        (start,) = of_kind(decided([*pair(), running(8, **changes)], [node], limits=SHARED), StartGroup)
        assert (start.oversubscribe, len(start.members)) == (shares, 2)
        assert pilot_job(start, "t", Config()).oversubscribe is shares


def test_who_shares_cpus_already_is_in_no_group_of_ordinary_jobs():
    """Slurm does not take it back; such a job would wait for ever beside an ordinary one."""
    node = make_node("n1", cpu_count=32, gpus_allocated=1, cpus_allocated=4)
    jobs = pair(oversubscribe=True)
    assert not of_kind(decided([*jobs, running(8)], [node], limits=SHARED), StartGroup)
    assert kinds(decided(jobs, [node], limits=SHARED)) == [True]


def test_a_job_alone_that_is_planned_on_a_node_keeps_groups_there_ordinary():
    alone = candidate(3, words=",alone=1")
    both = decided([*pair(), alone], [make_node("n1")], limits=SHARED)
    assert [action.job_id for action in of_kind(both, ReleaseSolo)] == [3]
    assert kinds(both) == [False]
    assert set(kinds(decided([*pair(), alone], [make_node("n1"), make_node("n2")], limits=SHARED))) == {True}


def test_jobs_behind_pilots_of_their_own_share_a_node():
    jobs = [candidate(number, f"m{number}", cpu_count=8) for number in (1, 2)]
    found = decided(jobs, [make_node("n1", cpu_count=16)], limits=SHARED)
    assert kinds(found) == [True, True]
    assert kinds(decided(jobs, [make_node("n1", cpu_count=16)])) == []


def test_a_pilot_that_a_limit_makes_larger_is_counted_as_it_is():
    node, demand = make_node("n1", cpu_count=11, gpus_allocated=1), Limits(min_tres_per_job=(Tres("cpu", 4),))
    jobs = pair(account="hep", qos="normal", user="alice")
    for demanded, size in ((NO_LIMITS, 2), (demand, 0)):
        limits = SiteLimits(
            partitions=(PartitionLimits("main"),), enforced=True, qos=(Qos("normal", demanded),),
            associations=(Association("root"), Association("hep", parent="root"), Association("hep", "alice")),
        )  # fmt: skip
        found = [start for start in of_kind(decided(jobs, [node], limits=limits), StartGroup) if len(start.members) > 1]
        assert sum(len(start.members) for start in found) == size


def test_the_job_that_starts_in_place_of_a_group_keeps_the_cpus_that_come_with_its_gpus():
    crowded = [replace(job, user="bob", uid=1002, submit_s=NOW_S - 900) for job in pair(1, cpus_per_gpu=8)]
    jobs = [*crowded, *(replace(job, job_id=job.job_id + 2) for job in pair(5))]
    found = decided(jobs, [make_node("n1", gpu_count=2, cpu_count=16)])
    assert [len(start.members) for start in of_kind(found, StartGroup)] == []
    assert len(of_kind(found, ReleaseSolo)) == 2


@pytest.mark.parametrize("waits", [False, True])
def test_a_job_that_shares_cpus_beside_an_ordinary_one_or_waits_for_its_end_keeps_no_group_off_the_node(waits):
    sharer = {"oversubscribe": True, "gpu_count": 0, "gpu_request": ""}
    if waits:  # such as a member that runs alone now
        sharer = {"oversubscribe": True, "state": JobState.PENDING, "nodes": "", "start_s": 0.0, "reason": "Resources",
                  "admin_comment": "muri:model=m3,batch-size=8,duration=100"}  # fmt: skip
    others = [running(8, gpu_count=0, gpu_request=""), running(9, **sharer)]
    for cpus, kind in ((32, [False]), (16, [])):
        node = make_node("n1", gpu_count=1 + waits, cpu_count=cpus, cpus_allocated=4 if waits else 8)
        assert kinds(decided([*pair(), *others], [node], limits=SHARED)) == kind


def test_a_group_is_as_large_as_its_layers_or_cpus_allow():
    jobs = [candidate(number, f"m{number}") for number in (1, 2, 3, 4)]
    for layers, cpus, size in ((8, 4, 4), (4, 4, 3), (3, 4, 2), (1, 17, 4), (1, 16, 3), (1, 9, 2)):
        limits = SiteLimits(partitions=(PartitionLimits("main", oversubscribe=layers),))
        nodes = [make_node("n1", gpu_count=1, cpu_count=cpus)]
        (start,) = of_kind(decided(jobs, nodes, limits=limits), StartGroup)
        assert len(start.members) == size


# Joins


def at_work(**pilot: Any) -> list[Job]:
    """A job alone behind its pilot; both hold CPUs of n1."""
    jobs = behind_pilot(1, candidate(2001), **pilot)
    return [replace(job, oversubscribe=jobs[0].oversubscribe) for job in jobs]


def joined(jobs: list[Job], limits: SiteLimits = SHARED, **node: Any) -> list[tuple[int, bool]]:
    """Who joins, and whether it is to share CPUs."""
    nodes = [make_node("n1", **{"gpu_count": 1, "gpus_allocated": 1, "cpu_count": 4, "cpus_allocated": 4, **node})]
    found = decided([*jobs, candidate(1, "m2")], nodes, limits=limits)
    return [(join.member.job_id, join.oversubscribe) for join in of_kind(found, Join)]


def test_who_joins_a_group_that_shares_cpus_shares_them():
    assert joined(at_work(oversubscribe=True)) == [(1, True)]
    assert joined(at_work()) == []
    assert joined(at_work(), cpu_count=9, cpus_allocated=5) == [(1, False)]


def test_nobody_joins_a_group_that_shares_cpus_beside_an_ordinary_job():
    others = [running(8, gpu_count=0, gpu_request="")]
    assert joined([*at_work(oversubscribe=True), *others], cpu_count=32) == []


def test_who_shares_cpus_already_joins_no_group_of_ordinary_jobs():
    node = make_node("n1", gpu_count=1, gpus_allocated=1, cpu_count=32, cpus_allocated=5)
    for oversubscribe, ids in ((False, [2]), (True, [])):
        jobs = [candidate(1, "m2", oversubscribe=True), candidate(2, "m2", oversubscribe=oversubscribe)]
        found = decided([*at_work(), *jobs], [node], limits=SHARED)
        assert [join.member.job_id for join in of_kind(found, Join)] == ids
    found = decided([*at_work(), candidate(1, "m2", oversubscribe=True)], [node])
    assert len(of_kind(found, Join)) == 1  # without layers, Slurm takes no notice of it


def test_nobody_joins_without_a_layer_or_memory_of_its_own():
    two = SiteLimits(partitions=(PartitionLimits("main", oversubscribe=2),))
    assert joined(at_work(oversubscribe=True), two) == []
    counted = SiteLimits(partitions=(PartitionLimits("main", oversubscribe=4, counts_mem=True, default_mem=True),))
    asked = candidate(1, "m2", mem_per_node_mib=8 * GIB)
    for free_mib, ids in ((8 * GIB, [1]), (8 * GIB - 1, [])):
        nodes = [make_node("n1", gpu_count=1, gpus_allocated=1, cpu_count=4, cpus_allocated=4, mem_mib=free_mib)]
        found = decided([*at_work(oversubscribe=True), asked], nodes, limits=counted)
        assert [join.member.job_id for join in of_kind(found, Join)] == ids


def test_of_two_that_would_join_one_node_the_second_waits_where_its_cpus_are_not_left():
    jobs = [*behind_pilot(1, candidate(2001)), *behind_pilot(2, candidate(2002, "m2"))]
    jobs = [replace(job, nodes="n1") for job in jobs]
    waiting = [candidate(1, "m3", cpu_count=8), candidate(2, "m4", cpu_count=8)]
    node = make_node("n1", gpus_allocated=2, cpu_count=18, cpus_allocated=10)
    found = decided([*jobs, *waiting], [node])
    assert len(of_kind(found, Join)) == 1
    (why,) = found.preparation.waiting.values()
    assert why == "it cannot join yet: n1 has 0 CPUs left, 8 are needed"


def test_a_group_of_an_earlier_version_is_left_to_end():
    pilot, member = at_work(cpu_count=8)
    old = replace(member, admin_comment=tags.with_token(member.admin_comment, tags.GRANT_PREFIX, None), cpu_count=1)
    assert joined([pilot, old], cpu_count=32, cpus_allocated=9) == []
    assert joined([pilot, member], cpu_count=32, cpus_allocated=9) == [(1, False)]


@pytest.mark.parametrize("licensed", [False, True])
def test_a_member_that_has_not_started_without_the_word_for_its_pilots_gpus_is_planned_anew(make_controller, licensed):
    """As after an upgrade, or where a tool of the site has written over AdminComment: it would run without a GPU."""
    jobs = [behind_license(job) for job in four_jobs()[:2]] if licensed else four_jobs()[:2]
    slurm = FakeSlurm(jobs, [make_node("n1", gpu_count=1, gpus_allocated=0)], gate_license=licensed)
    one_cycle(make_controller, slurm)
    first = pilots(slurm)[0].job_id
    for number in (1, 2):
        comment = tags.with_token(slurm.jobs[number].admin_comment, tags.GRANT_PREFIX, None)
        slurm.modify(number, JobChange(admin_comment=comment))
    one_cycle(make_controller, slurm)
    found = [read_job(slurm.jobs[number]) for number in (1, 2)]
    assert [asked_by(job) for job in found] == [asked_by(job) for job in jobs]
    assert [job.role for job in found] == [Role.CANDIDATE] * 2
    slurm.now_s += 120  # their pilot is given up
    run_cycles(make_controller, slurm, 3)
    second = {read_job(slurm.jobs[number]).membership.pilot for number in (1, 2)}
    assert first not in second
    assert [slurm.jobs[number].state for number in (1, 2)] == [JobState.RUNNING] * 2


# On the way through Slurm


def test_jobs_that_ask_for_all_cpus_of_a_node_run_at_once_and_are_put_back(make_controller):
    slurm = FakeSlurm(
        four_jobs(mem_per_node_mib=GIB)[:3], [make_node("n1", gpu_count=1, cpu_count=4, mem_mib=64 * GIB)]
    )
    slurm.limits = SHARED
    run_cycles(make_controller, slurm, 3)
    (pilot,) = pilots(slurm)
    members = [slurm.jobs[number] for number in (1, 2, 3)]
    assert [job.state for job in (pilot, *members)] == [JobState.RUNNING] * 4
    assert [(job.cpu_count, job.mem_per_node_mib, job.oversubscribe) for job in (pilot, *members)] == [
        (1, 512, True), *[(4, GIB, True)] * 3
    ]  # fmt: skip
    slurm.end(1, pilot.job_id)
    for number in (2, 3):
        slurm.requeue_hold(number)
    one_cycle(make_controller, slurm)
    assert not any(read_job(slurm.jobs[number]).membership for number in (2, 3))
    assert [slurm.jobs[number].gpu_count for number in (2, 3)] == [1, 1]


def test_a_member_that_an_ordinary_job_keeps_off_its_node_runs_alone_in_the_end(make_controller):
    """It came between the pilot's start and the members'."""
    ordinary = make_job(1, held=False, reason="", gpu_count=0, gpu_request="", admin_comment="", user="bob", uid=7)
    jobs = [ordinary, *(behind_license(job) for job in four_jobs()[1:3])]
    slurm = FakeSlurm(jobs, [make_node("n1", gpu_count=1, cpu_count=16)], gate_license=True)
    slurm.limits = SHARED
    one_cycle(make_controller, slurm)
    slurm.tick()
    assert [slurm.jobs[number].state for number in (1, 2, 3)] == [JobState.RUNNING, *[JobState.PENDING] * 2]
    for number in (2, 3):
        slurm._update(number, reason="Resources")
    slurm.now_s += 60
    one_cycle(make_controller, slurm)
    assert [slurm.jobs[number].gpu_count for number in (2, 3)] == [1, 1]
    assert all(job.state is JobState.CANCELLED for job in pilots(slurm))


def test_threads_work_in_their_pilot_with_what_they_ask_for():
    facts = f" {tags.FACTS_PREFIX}1.{'b' * 16}.{'c' * 16}..YQA"
    known = [replace(each, detail=ProfileDetail(dangers=())) for each in FOUR_KINDS]
    jobs = [candidate(number, f"m{number}", facts, mem_per_node_mib=2 * GIB) for number in (1, 2)]
    jobs = [replace(job, admin_comment=f"muri:model=m{job.job_id},batch-size=8,duration=100{facts}") for job in jobs]
    nodes = [make_node("n1", gpu_count=1, cpu_count=8)]
    (start,) = of_kind(decided(jobs, nodes, known=known, grouping={"isolation": "auto"}), StartGroup)
    assert [(member.isolation, member.cpu_count) for member in start.members] == [("thread", 1)] * 2
    assert (start.cpu_count, start.mem_per_node_mib) == (4, 4 * GIB)
