"""Jobs alone that others may join: who starts behind a pilot of its own, with what, and who starts plain, and why."""

from dataclasses import replace
from functools import partial
from typing import Any

import at_work
import pytest
from at_work import HOUR_S, Changed, behind_pilot, candidate
from fake_slurm import FOUR_KINDS, NOW_S, FakeSlurm, Killed, make_node, one_cycle, pilots

from muri.policies.registry import get_policy
from muri.policies.types import CpuMemShare, Group, Plan, PlanRequest
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.planning.actions import Join, ReleaseSolo, StartGroup, started
from muri.slurm_plugin.planning.decision import decide
from muri.slurm_plugin.planning.slurm_requests import asked_by, pilot_job
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobChange, JobState
from muri.slurm_plugin.records.limits import (
    NO_LIMITS,
    NO_SITE_LIMITS,
    Association,
    Limits,
    PartitionLimits,
    Qos,
    SiteLimits,
)
from muri.slurm_plugin.records.roles import read_job

GIB = 1024
TWO_GPUS = replace(FOUR_KINDS[0], key=replace(FOUR_KINDS[0].key, gpu_count=2))
GUESSED = replace(FOUR_KINDS[0], key=replace(FOUR_KINDS[0].key, model="new"), source="guess")

cycle_of, decided = (
    partial(each, known=(*FOUR_KINDS, TWO_GPUS, GUESSED)) for each in (at_work.cycle_of, at_work.decided)
)


def alone_behind_pilot(number: int, **pilot: Any) -> list[Job]:
    return behind_pilot(number, candidate(2000 + number), **pilot)


def joins(*job_ids: int) -> Changed:
    """A policy that lets jobs join the first unit that runs."""

    def join(request: PlanRequest, plan: Plan) -> Plan:
        if not job_ids:
            return plan
        unit = request.running[0]
        others = tuple(each.job_id for each in unit.members)
        members = others + job_ids
        group = Group(members, unit.gpus, 1, 1.0, 1.0, dict.fromkeys(members, 0.9), joining=job_ids)
        kept = tuple(each for each in plan.groups if not set(each.members) & set(others))
        solo = tuple(each for each in plan.solo if each.job_id not in members)
        waiting = tuple(each for each in plan.waiting if each.job_id not in members)
        return replace(plan, groups=(*kept, group), solo=solo, waiting=waiting)

    return Changed(get_policy("muri-s", {"preemption": False}), join)


def test_a_job_that_may_share_starts_behind_a_pilot_of_its_own():
    (start,) = decided([candidate(1)], [make_node("n1")]).actions
    assert isinstance(start, StartGroup)
    assert [member.job_id for member in start.members] == [1]
    assert (start.node, start.time_limit_s, start.members[0].time_limit_s) == ("n1", HOUR_S + 600, HOUR_S)
    assert start.reasons[-1] == "others may join it while it runs"


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({"words": ",alone=1"}, {}),
        ({"can_requeue": False}, {}),
        ({"gpu_count": 2, "gpu_request": "gres/gpu:2"}, {}),
        ({}, {"policy": "fifo"}),
        ({}, {"grouping": {"join": False}}),
        ({}, {"grouping": {"discipline": "lockstep"}}),
        ({}, {"grouping": {"max_group_size": 1}}),
        ({"model": "unknown"}, {"profiling": {"at_once": 0}}),
        # Nothing is measured that no plan needs or that dry runs measure.
        ({"model": "new"}, {"grouping": {"join": False}, "profiling": {"mode": "dry-run", "at_once": 0}}),
        ({"model": "new"}, {"grouping": {"join": False}, "policy": "fifo"}),
    ],
)
def test_other_jobs_start_plain(changes, config):
    (start,) = decided([candidate(1, **changes)], [make_node("n1")], **config).actions
    assert isinstance(start, ReleaseSolo)
    assert not any("join" in reason for reason in start.reasons)


@pytest.mark.parametrize("grouping", [{"join": False}, {"discipline": "lockstep"}])
def test_where_nobody_may_join_a_model_never_seen_is_measured_behind_a_pilot(grouping):
    node = make_node("n1", cpu_count=32, mem_mib=64 * GIB)
    asked = candidate(1, model="new", cpu_count=4, mem_per_node_mib=8 * GIB)
    (start,) = decided([asked], [node], grouping=grouping).actions
    assert isinstance(start, StartGroup)
    assert (start.members[0].cpu_count, start.members[0].original.mem_per_node_mib) == (4, 8 * GIB)
    assert "its model is measured while it runs" in start.reasons
    assert not any("join" in reason for reason in start.reasons)


@pytest.mark.parametrize(
    ("asked", "limits", "mem_mib"),
    [
        ({}, PartitionLimits("main"), 0),
        ({}, PartitionLimits("main", counts_mem=True, default_mem=True), 512),
        ({"mem_per_node_mib": 8 * GIB}, PartitionLimits("main"), 512),
    ],
)
def test_the_pilot_asks_for_little_and_its_member_keeps_what_it_has(asked, limits, mem_mib):
    nodes, limits = [make_node("n1", mem_mib=64 * GIB)], SiteLimits(partitions=(limits,))
    (start,) = decided([candidate(1, cpu_count=20, **asked)], nodes, limits=limits).actions
    assert isinstance(start, StartGroup)
    assert (start.cpu_count, start.mem_per_node_mib, start.members[0].cpu_count) == (1, mem_mib, 20)


COUNTED = SiteLimits(partitions=(PartitionLimits("main", counts_mem=True),))


@pytest.mark.parametrize(
    ("asked", "node", "why"),
    [
        ({"cpu_count": 1, "mem_per_node_mib": GIB}, {"cpus_allocated": 31}, "n1 has 1 CPUs left, 2 are needed"),
        # Slurm gives out whole cores.
        ({"mem_per_node_mib": GIB}, {"cpus_allocated": 27, "threads_per_core": 2}, "n1 has 5 CPUs left, 6 are needed"),
        ({"mem_per_node_mib": 64 * GIB}, {"mem_mib": 64 * GIB}, "n1 has 65536 MiB of memory left, 66048 are needed"),
    ],
)
def test_where_a_node_has_no_room_for_a_pilot_the_job_starts_plain(asked, node, why):
    for model, grouping, what in (("m1", {}, "no job can join it"), ("new", {"join": False}, "it cannot be measured")):
        jobs, nodes = [candidate(1, model, **asked)], [make_node("n1", **{"mem_mib": 64 * GIB, **node})]
        (start,) = decided(jobs, nodes, limits=COUNTED, grouping=grouping).actions
        assert isinstance(start, ReleaseSolo)
        assert start.reasons[-1] == f"{what}: {why}"


@pytest.mark.parametrize(
    ("free", "kinds"), [(18, [StartGroup] * 2), (17, [StartGroup, ReleaseSolo]), (16, [ReleaseSolo] * 2)]
)
def test_a_pilot_takes_nothing_that_another_start_asks_for(free, kinds):
    jobs, node = [candidate(1, cpu_count=8), candidate(2, cpu_count=8)], make_node("n1", cpu_count=free)
    assert [type(start) for start in decided(jobs, [node]).actions] == kinds


def site(own: Limits = NO_LIMITS, qos: Limits = NO_LIMITS) -> SiteLimits:
    return SiteLimits(
        partitions=(PartitionLimits("main"),),
        enforced=True,
        qos=(Qos("normal", qos), Qos("pilots", NO_LIMITS)),
        associations=(Association("root"), Association("hep", parent="root"), Association("hep", "alice", limits=own)),
    )


def three_jobs() -> list[Job]:
    return [candidate(number, f"m{number}", account="hep", qos="normal") for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("limits", "setting"),
    [
        (site(own=Limits(max_jobs_per_user=5)), "(MaxJobs)"),
        (site(own=Limits(max_submit_per_user=7)), "(MaxSubmitJobs)"),
        (site(qos=Limits(grp_jobs=5)), "(GrpJobs)"),
    ],
)
def test_a_limit_on_jobs_costs_nobody_a_running_job(limits, setting):
    starts = decided(three_jobs(), [make_node("n1"), make_node("n2")], limits=limits).actions
    assert [type(start) for start in starts] == [ReleaseSolo] * 3
    assert all(setting in start.reasons[-1] for start in starts)


def test_where_a_limit_on_jobs_is_far_away_pilots_count():
    nodes = [make_node("n1"), make_node("n2")]
    # Three jobs wait and each pilot is one more, so the third one would be the sixth of ten.
    for most, third in ((12, StartGroup), (10, ReleaseSolo)):
        starts = decided(three_jobs(), nodes, limits=site(own=Limits(max_jobs_per_user=most))).actions
        assert [type(start) for start in starts] == [StartGroup, StartGroup, third]


def test_pilots_with_a_qos_of_their_own_do_not_count_in_the_users():
    nodes, limits = [make_node("n1"), make_node("n2")], site(qos=Limits(max_jobs_per_user=3))
    starts = decided(three_jobs(), nodes, limits=limits, pilot={"qos": "pilots"}).actions
    assert [type(start) for start in starts] == [StartGroup] * 3
    config = Config.model_validate({"pilot": {"qos": "pilots"}})
    assert {pilot_job(start, "t", config).qos for start in starts} == {"pilots"}
    of_account = site(own=Limits(max_jobs_per_user=3))
    starts = decided(three_jobs(), nodes, limits=of_account, pilot={"qos": "pilots"}).actions
    assert [type(start) for start in starts] == [ReleaseSolo] * 3


def test_a_refused_pilot_lets_its_job_start_plain_in_the_same_cycle(make_controller):
    slurm = FakeSlurm([candidate(1)], [make_node("n1")])

    def refuse(name: str) -> None:
        if name == "submit":
            raise GatewayError("Invalid qos specification")

    slurm.before_call = refuse
    with make_controller(slurm) as controller:
        status = controller.cycle()
    slurm.tick()
    assert (slurm.jobs[1].state, slurm.jobs[1].gpu_count) == (JobState.RUNNING, 1)
    (told,) = status.jobs
    assert told.reasons[-1] == "no job can join it: Slurm refused its pilot job: Invalid qos specification"
    assert any("Invalid qos specification" in error for error in status.errors)


def refusing(monkeypatch, slurm: FakeSlurm, *job_ids: int, applies: JobChange | None) -> None:
    """Have Slurm refuse a job's first change, of which it may have made a part; None: all of it."""
    modify, left = slurm._modify, set(job_ids)

    def fail_once(job_id: int, change: JobChange) -> None:
        if job_id not in left:
            modify(job_id, change)
            return
        left.remove(job_id)
        modify(job_id, change if applies is None else applies)
        raise GatewayError("Invalid generic resource (gres) specification")

    monkeypatch.setattr(slurm, "_modify", fail_once)


@pytest.mark.parametrize("applies", [None, JobChange(), JobChange(required_nodes="n1", cpu_count=1)])
@pytest.mark.parametrize("count", [1, 2])
def test_a_group_whose_changes_slurm_refuses_is_undone_whole_and_at_once(make_controller, monkeypatch, count, applies):
    jobs = [candidate(number, f"m{number}") for number in range(1, count + 1)]
    slurm = FakeSlurm(jobs, [make_node("n1", gpu_count=1)])
    refusing(monkeypatch, slurm, 1, 2, applies=applies)
    told = one_cycle(make_controller, slurm)
    (pilot,) = pilots(slurm)
    slurm.tick()
    assert pilot.state is JobState.CANCELLED
    assert slurm.jobs[1].state is JobState.RUNNING
    for job in jobs:
        now = slurm.jobs[job.job_id]
        assert asked_by(now) == asked_by(job)
        assert (now.dependency, now.held, tags.is_member(now.admin_comment)) == ("", False, False)
        assert "Slurm refused to change its request: Invalid generic" in " ".join(told[job.job_id].reasons)


def test_a_job_that_slurm_refuses_to_change_leaves_its_group_and_waits_with_its_own_request(
    make_controller, monkeypatch
):
    jobs = [candidate(1, "m1"), candidate(2, "m2")]
    slurm = FakeSlurm(jobs, [make_node("n1", gpu_count=1)])
    refusing(monkeypatch, slurm, 2, applies=JobChange(required_nodes="n1", cpu_count=1))
    with make_controller(slurm) as controller:
        controller.cycle()
        assert asked_by(slurm.jobs[2]) == asked_by(jobs[1])
        for _ in range(2):
            slurm.tick()
        assert [slurm.jobs[number].state for number in (1, 2)] == [JobState.RUNNING, JobState.PENDING]
        for job in (*pilots(slurm), slurm.jobs[1]):
            slurm.end(job.job_id)
        controller.cycle()
        slurm.tick()
    assert (slurm.jobs[2].state, slurm.jobs[2].gpu_count) == (JobState.RUNNING, 1)


def test_users_read_that_such_a_job_runs_alone_and_without_its_pilot_it_goes_back_and_runs_plain(make_controller):
    slurm = FakeSlurm([candidate(1)], [make_node("n1")])
    with make_controller(slurm) as controller:
        controller.cycle()
        for _ in range(2):
            slurm.tick()
        (told,) = controller.cycle().jobs
        (pilot,) = pilots(slurm)
        assert (told.state, told.group, told.partners) == ("alone", pilot.job_id, ())
        assert "others may join it while it runs" in told.reasons
        slurm.end(pilot.job_id, state=JobState.FAILED)
        slurm.requeue_hold(1)
        controller.cycle()
        slurm.now_s += 300
        controller.cycle()
    slurm.tick()
    assert (slurm.jobs[1].state, slurm.jobs[1].gpu_count, len(pilots(slurm))) == (JobState.RUNNING, 1, 1)


def test_what_runs_is_in_every_request():
    at_work = {"state": JobState.RUNNING, "held": False, "reason": "", "nodes": "n3", "start_s": NOW_S - 600}
    plain = candidate(3, admin_comment="muri:model=m3,batch-size=8,duration=1000", **at_work)
    busy = {"gpu_count": 1, "gpus_allocated": 1, "cpus_allocated": 5}
    nodes = [make_node(f"n{number}", **busy) for number in (1, 2, 3)]
    several = {"gpu_count": 2, "gpu_request": "gres/gpu:2"}
    jobs = [*alone_behind_pilot(1), *alone_behind_pilot(2, **several), plain]
    nodes[1] = replace(nodes[1], gpu_count=2, gpus_allocated=2)
    request = decided(jobs, nodes).preparation.request
    found = {unit.members[0].job_id: unit for unit in request.running}
    assert {job_id: unit.joinable for job_id, unit in found.items()} == {2001: True, 2002: True, 3: False}
    member = found[2001].members[0]
    assert (member.partition, member.gpu_count, member.groupable, member.preemptible) == ("main", 1, True, False)
    assert (member.attained_gpu_s, member.remaining_s) == (600.0, 540.0)  # 100 seconds stated, and 540 done
    assert found[3].members[0].remaining_s == 400.0


def test_what_runs_has_the_place_and_the_memory_of_what_its_user_asked_for():
    asked = {"features": "a100", "mem_per_node_mib": 8 * GIB}
    jobs = behind_pilot(1, candidate(2001, **asked), mem_per_node_mib=512)
    nodes = [
        make_node(
            "n1", features=("a100",), gpu_count=1, gpus_allocated=1, cpus_allocated=5, mem_mib=32 * GIB,
            mem_allocated_mib=9 * GIB,
        ),
        make_node("n2", gpu_count=1, gpus_allocated=1),
    ]  # fmt: skip
    waiting = candidate(1, "m2", features="a100", mem_per_node_mib=16 * GIB)
    for limits, spare_gib in ((COUNTED, 23.0), (NO_SITE_LIMITS, float("inf"))):
        request = decided([*jobs, waiting], nodes, limits=limits).preparation.request
        (unit,) = request.running
        assert {each.partition for each in (*request.jobs, *unit.members)} == {"main (--constraint=a100)"}
        assert (unit.joinable, unit.spare_mem_gib, unit.members[0].mem_gib) == (True, spare_gib, 8.0)
        assert unit.cpu_mem_shares == {2001: (CpuMemShare("n1", 5.0, 8.5),)}


def test_several_jobs_join_a_unit_in_one_cycle():
    jobs = [*alone_behind_pilot(1), candidate(1, "m2"), candidate(2, "m3", time_limit_s=3 * HOUR_S)]
    cycle = cycle_of(jobs, [make_node("n1", gpu_count=1, gpus_allocated=1, cpus_allocated=5)])
    first, second = decide(cycle, joins(1, 2)).actions
    assert isinstance(first, Join)
    assert isinstance(second, Join)
    assert [(join.member.job_id, join.size, join.others) for join in (first, second)] == [
        (1, 3, ((2001, 3 * HOUR_S),)),
        (2, 3, ((2001, 3 * HOUR_S),)),
    ]
    assert [join.member.time_limit_s for join in (first, second)] == [3 * HOUR_S, 9 * HOUR_S]
    assert first.pilot_limit_s == second.pilot_limit_s == 600 + 9 * HOUR_S + 600


def cycle_with_joins(slurm: FakeSlurm, make_controller: Any) -> None:
    """A cycle of a new controller whose policy lets all join who still wait."""
    waiting = [number for number in (2, 3) if not tags.is_member(slurm.jobs[number].admin_comment)]
    with make_controller(slurm) as controller:
        controller._policy_for = lambda _: joins(*waiting)
        controller.cycle()


def one_and_two_more(make_controller: Any) -> FakeSlurm:
    """A job alone behind its pilot, and two that wait."""
    slurm = FakeSlurm([candidate(1)], [make_node("n1", gpu_count=1)])
    one_cycle(make_controller, slurm)
    for _ in range(2):
        slurm.tick()
    slurm.jobs |= {2: candidate(2, "m2"), 3: candidate(3, "m3")}
    return slurm


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("nth", range(1, 10))
def test_killed_between_two_joins_both_are_carried_on(make_controller, side, nth):
    slurm = one_and_two_more(make_controller)
    with pytest.raises(Killed), slurm.killing(side, nth):
        cycle_with_joins(slurm, make_controller)
    for _ in range(3):
        cycle_with_joins(slurm, make_controller)
        slurm.tick()
    (pilot,) = pilots(slurm)
    assert set(tags.parse_pilot(pilot.admin_comment).members) == {1, 2, 3}
    assert [slurm.starts[number] for number in (1, 2, 3)] == [1, 1, 1]
    assert all(read_job(slurm.jobs[number]).membership.pilot == pilot.job_id for number in (1, 2, 3))


def test_a_join_is_not_carried_on_with_a_request_that_its_user_has_changed_meanwhile(make_controller):
    slurm = one_and_two_more(make_controller)
    with pytest.raises(Killed), slurm.killing("before", 1):
        cycle_with_joins(slurm, make_controller)
    slurm._update(2, time_limit_s=7200)
    for _ in range(3):
        cycle_with_joins(slurm, make_controller)
        slurm.tick()
    assert read_job(slurm.jobs[2]).membership.original.time_limit_s == 7200


@pytest.mark.parametrize(
    ("node", "counts_mem", "why"),
    [
        ({"cpu_count": 18}, True, ""),
        ({"cpu_count": 17}, True, "n1 has 8 CPUs left, 9 are needed"),
        ({"mem_mib": 17 * GIB - 1}, True, "n1 has 8703 MiB of memory left, 8704 are needed"),
        ({"mem_mib": 17 * GIB - 1}, False, ""),
        ({"mem_mib": 17 * GIB}, True, ""),
    ],
)
def test_of_two_groups_that_a_node_cannot_hold_the_second_does_not_start(node, counts_mem, why):
    """Its pilot would keep a GPU while Slurm has no room for its members."""
    jobs = [replace(candidate(number, f"m{number % 2 + 1}"), mem_per_node_mib=4 * GIB) for number in range(1, 5)]
    limits = SiteLimits(partitions=(PartitionLimits("main", counts_mem=counts_mem),))
    nodes = [make_node("n1", **{"cpu_count": 64, "mem_mib": 64 * GIB, **node})]
    decision = decided(jobs, nodes, limits=limits, grouping={"join": False})
    first, second = decision.actions
    assert isinstance(first, StartGroup)
    assert isinstance(second, ReleaseSolo if why else StartGroup)
    assert why in " ".join(second.reasons)
    kept = {job.job_id for job in jobs} - started(decision.actions)
    assert all(why in decision.preparation.waiting[job_id] for job_id in kept)
