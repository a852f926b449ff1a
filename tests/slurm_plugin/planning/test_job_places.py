"""Where jobs may run: constraints, exclusions, required nodes, reservations; what is left to Slurm; what is free."""

from dataclasses import replace

import pytest
from at_work import behind_pilot, candidate, cycle_of, decided
from fake_slurm import NOW_S, FakeSlurm, behind_license, make_job, make_node, one_cycle, pilots

from muri.policies.types import FreeNode
from muri.slurm_plugin.planning.gathered import domain_of, gather
from muri.slurm_plugin.planning.placement import Places
from muri.slurm_plugin.planning.site_limits import SiteRoom
from muri.slurm_plugin.records.cluster import Job, JobState, Node, Reservation, Snapshot
from muri.slurm_plugin.records.journal import EXCLUSION
from muri.slurm_plugin.records.roles import read_job, view_of

GIB = 1024
NODES = (
    make_node("n1", features=("a100", "big")),
    make_node("n2", features=("a100",)),
    make_node("n3", features=("v100",)),
    make_node("n4", partitions=("debug",), features=("a100",)),
)
SOON = Reservation("maint", "n[1-2]", NOW_S + 6 * 3600, NOW_S + 8 * 3600, ("MAINT",))
NOW = Reservation("course", "n3", NOW_S - 60, NOW_S + 3600)


def place(*reservations: Reservation, **request):
    job = make_job(1, **request)
    return Places(Snapshot(NOW_S, "c", "26.05", (job,), NODES, reservations)).of(job)


@pytest.mark.parametrize(
    ("request_", "nodes"),
    [
        ({}, "n1 n2 n3"),
        ({"partition": "debug"}, "n4"),
        ({"features": "a100"}, "n1 n2"),
        ({"features": "a100&big"}, "n1"),
        ({"features": "v100|big"}, "n1 n3"),
        ({"excluded_nodes": "n[2-3]"}, "n1"),
        ({"required_nodes": "n2"}, "n2"),
        ({"required_nodes": "n2", "node_count": 2}, "n1 n2 n3"),
        ({"features": "a100", "excluded_nodes": "n1"}, "n2"),
    ],
)
def test_a_request_names_its_nodes(request_, nodes):
    found = place(**request_)
    assert found.nodes == frozenset(nodes.split())
    assert found.left_to_slurm == ""
    assert place(features="a100", excluded_nodes="n1").name == "main (--constraint=a100, --exclude=n1)"


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"features": "h100"}, "no node of its partition"),
        ({"features": "a100&(big|v100)"}, "cannot tell"),
        ({"node_count": 2_000_000_000}, "asks for 2000000000 nodes and may get 3"),
        ({"excluded_nodes": "n[1-3]"}, "no node of its partition"),
        ({"excluded_nodes": "n[1-2000000000]"}, "cannot tell"),
        ({"required_nodes": "@all"}, "cannot tell"),
        ({"reservation": "absent"}, "reservation absent is not active"),
    ],
)
def test_what_no_node_can_give_is_left_to_slurm(request_, why):
    assert why in place(**request_).left_to_slurm


def test_a_reservation_is_for_its_own_jobs():
    assert place(NOW).nodes == {"n1", "n2"}
    assert place(replace(NOW, end_s=NOW_S - 1)).nodes == {"n1", "n2", "n3"}, "it is over"
    assert place(NOW, reservation="course").nodes == {"n3"}
    assert "course" in place(NOW, required_nodes="n3").left_to_slurm


def test_a_job_must_end_before_the_maintenance():
    assert place(SOON, time_limit_s=5 * 3600).nodes == {"n1", "n2", "n3"}
    assert place(SOON, time_limit_s=36 * 3600).nodes == {"n3"}
    assert place(SOON, time_limit_s=0).nodes == {"n3"}
    assert "maint" in place(SOON, time_limit_s=36 * 3600, features="a100").left_to_slurm


@pytest.mark.parametrize(
    "change",
    [
        {"account": "poor"},
        {"qos": "high"},
        {"reservation": "r"},
        {"licenses": "matlab:1"},
        {"features": "a100"},
        {"excluded_nodes": "n1"},
        {"gpu_request": "gres/gpu:a100:1"},
    ],
)
def test_what_differs_between_jobs_keeps_them_apart(make_controller, change):
    jobs = [behind_license(each) for each in (candidate(1, "m1"), candidate(2, "m2", **change))]
    assert domain_of(jobs[0]) != domain_of(jobs[1])
    slurm = FakeSlurm(jobs, [make_node("n1", gpu_count=1, features=("a100",))], gate_license=True)
    one_cycle(make_controller, slurm)
    assert [len(read_job(pilot).pilot_tag.members) for pilot in pilots(slurm)] == [1]


@pytest.mark.parametrize("option", ["--exclusive", "--switches", "--gpus"])
def test_what_muri_does_not_understand_runs_alone_with_its_request_untouched(make_controller, option):
    jobs = [behind_license(each) for each in (candidate(1, "m1"), candidate(2, "m2", special=(option,)))]
    slurm = FakeSlurm(jobs, [make_node("n1", gpu_count=1)], gate_license=True)
    with make_controller(slurm) as controller:
        controller.cycle()
        (pilot,) = pilots(slurm)
        assert read_job(pilot).pilot_tag.members == (1,)
        slurm.end(1)
        slurm.end(pilot.job_id)
        slurm.tick()
        status = controller.cycle()
    assert len(pilots(slurm)) == 1
    assert not any(job.name == "muri-dryrun" for job in slurm.jobs.values())
    assert slurm.jobs[2].gpu_request == "gres/gpu:1"
    assert any(option in reason for job in status.jobs if job.job_id == 2 for reason in job.reasons)


def test_gpus_for_which_a_job_that_was_let_go_waits_are_nobody_elses():
    node, let_go = make_node("n1", gpu_count=1), {"held": False, "reason": "Resources"}
    assert decided([candidate(1), candidate(2, **let_go)], [node]).actions == ()
    assert len(decided([candidate(1), candidate(2, held=False, reason="QOSMaxGRESPerUser")], [node]).actions) == 1


def test_a_job_slurm_cannot_start_is_released_once_and_holds_no_gpu(make_controller):
    jobs = [candidate(1, "m1", time_limit_s=36 * 3600), candidate(2, "m2", time_limit_s=1200, submit_s=NOW_S - 10)]
    slurm = FakeSlurm([*map(behind_license, jobs)], [make_node("n1", gpu_count=1)], gate_license=True)
    slurm.reservations = (Reservation("maint", "n1", NOW_S + 6 * 3600, NOW_S + 8 * 3600, ("MAINT",)),)
    with make_controller(slurm) as controller:
        controller.cycle()
        assert "muri_gate" not in slurm.jobs[1].licenses
        slurm._update(1, reason="ReqNodeNotAvail, Reserved for maintenance")
        slurm.calls.clear()
        controller.cycle()
    assert slurm.calls.count("modify") <= 1
    assert "muri_gate" not in slurm.jobs[2].licenses
    assert slurm.jobs[1].state is JobState.PENDING


def test_a_job_for_one_node_and_a_group_are_not_promised_the_same_gpu(make_controller):
    jobs = [candidate(1, required_nodes="n1"), *(candidate(n, f"m{n}") for n in (2, 3, 4))]
    nodes = [make_node("n1", gpu_count=1), make_node("n2", gpu_count=1)]
    slurm = FakeSlurm([*map(behind_license, jobs)], nodes, gate_license=True)
    one_cycle(make_controller, slurm)
    promised = [job.required_nodes for job in pilots(slurm)]
    assert "n1" not in promised
    assert "muri_gate" not in slurm.jobs[1].licenses


def test_a_reservation_whose_nodes_cannot_be_read_leaves_jobs_to_slurm():
    assert place(Reservation("odd", "n[1-", NOW_S, NOW_S + 3600)).left_to_slurm


@pytest.mark.parametrize("order", [(1, 2_000_000_000), (2_000_000_000, 1)])
def test_a_job_on_too_many_nodes_says_nothing_of_other_jobs(order):
    places = Places(Snapshot(NOW_S, "c", "26.05", (), NODES))
    found = {count: places.of(make_job(1, node_count=count)).left_to_slurm for count in order}
    assert found[1] == ""
    assert "2000000000 nodes" in found[2_000_000_000]


# A group's pilot has a longer time limit than its members

TWO_H = 2 * 3600


def largest_before(hours: float, nodes: str = "n[1-3]", **changes) -> tuple[int, str]:
    job = make_job(1, time_limit_s=TWO_H, **changes)
    reservation = Reservation("maint", nodes, NOW_S + hours * 3600, NOW_S + 90 * 3600, ("MAINT",))
    view = view_of(Snapshot(NOW_S, "c", "26.05", (job,), NODES, (reservation,)))
    return SiteRoom(view).largest_group(view.jobs[1], 4)


@pytest.mark.parametrize(("hours", "size"), [(3, 1), (4, 1), (4.2, 2), (6.1, 2), (6.2, 3), (9, 4)])
def test_a_group_is_as_large_as_its_pilot_ends_before_the_maintenance(hours, size):
    found, why = largest_before(hours)
    assert found == size
    if size < 4:
        assert (
            why == f"the pilot job of a group of {size + 1} could not start: it would not end before reservation maint"
        )


def test_a_maintenance_on_some_nodes_leaves_groups_to_the_others():
    assert largest_before(3, "n[1-2]") == (4, "")
    assert largest_before(3, "n[1-2]", features="a100")[0] == 1
    assert largest_before(3, reservation="maint")[0] == 1, "its own reservation has not begun"


def test_where_a_plan_puts_a_group_on_a_node_with_a_maintenance_its_oldest_job_starts_alone(make_controller):
    """Policies do not know that a group needs other nodes than each of its jobs."""
    waiting = [behind_license(candidate(n, f"m{n}", time_limit_s=TWO_H)) for n in (1, 2)]
    away = make_node("n2", gpu_count=1, gpus_allocated=1)
    busy = make_job(9, state=JobState.RUNNING, held=False, nodes="n2", admin_comment="")
    slurm = FakeSlurm([*waiting, busy], [make_node("n1", gpu_count=1), away], gate_license=True)
    slurm.reservations = (Reservation("maint", "n1", NOW_S + 3 * 3600, NOW_S + 8 * 3600, ("MAINT",)),)
    with make_controller(slurm) as controller:
        assert controller.decision().plan.groups
        controller.cycle()
    assert not pilots(slurm)
    assert "muri_gate" not in slurm.jobs[1].licenses
    assert "muri_gate" in slurm.jobs[2].licenses


@pytest.mark.parametrize("gate_license", [True, False])
def test_members_of_a_pilot_that_starts_too_late_are_regrouped_and_not_barred(make_controller, gate_license):
    jobs = [candidate(n, f"m{n}") for n in (1, 2, 3)]
    waiting = [behind_license(job) if gate_license else job for job in jobs]
    slurm = FakeSlurm(waiting, [make_node("n1", gpu_count=1)], gate_license=gate_license)

    def members() -> list[int]:
        return [job.job_id for job in slurm.jobs.values() if read_job(job).membership is not None]

    with make_controller(slurm) as controller:
        for size in (3, 2, 0):
            controller.cycle()
            assert len(members()) == size
            slurm.now_s += 200
        assert controller._journal.facts(EXCLUSION) == {}
        assert sum(job.state.is_active for job in pilots(slurm)) == 0
        now = (slurm.jobs[job.job_id] for job in jobs)
        (first,) = (job for job in now if "muri_gate" not in job.licenses and not job.held)
        assert (first.gpu_request, first.dependency) == ("gres/gpu:1", "")
        slurm._update(first.job_id, state=JobState.COMPLETED)
        slurm.now_s += 3700
        controller.cycle()
        assert len(members()) == 2, "after an hour they are tried together again"


# What is free there


def free(*nodes: Node, jobs: tuple[Job, ...] = ()) -> tuple[FreeNode, ...]:
    return gather(cycle_of(jobs, nodes)).nodes


def test_what_is_free_leaves_out_what_waiting_jobs_were_promised():
    released = make_job(
        1, held=False, cpu_count=6, cpus_per_task=6, mem_per_node_mib=10 * GIB, required_nodes="n2", gpu_count=1
    )
    running = make_job(2, held=False, state=JobState.RUNNING, nodes="n1")
    nodes = (
        make_node("n1", mem_mib=64 * GIB, cpus_allocated=4, gpus_allocated=1, mem_allocated_mib=1024),
        make_node("n2", mem_mib=64 * GIB),
        make_node("n3", mem_mib=64 * GIB),
    )
    found = {node.name: node for node in free(*nodes, jobs=(released, running))}
    assert {name: (node.free_gpus, node.free_cpus, node.free_mem_gib) for name, node in found.items()} == {
        "n1": (1, 28.0, 63.0),
        "n2": (1, 26.0, 54.0),
        "n3": (2, 32.0, 64.0),
    }
    assert all((node.cpu_count, node.mem_gib) == (32.0, 64.0) for node in found.values())


@pytest.mark.parametrize("request_", [{"cpu_count": 2 * 10**9}, {"gpu_count": 100}, {"node_count": 2 * 10**9}])
def test_a_job_that_no_nodes_could_hold_is_promised_nothing(request_):
    """Slurm shows "Priority" until it is the job's turn, and only then that it can never start."""
    released = make_job(1, held=False, reason="Priority", **request_)
    found = free(make_node("n1"), make_node("n2"), jobs=(released,))
    assert [(node.free_gpus, node.free_cpus) for node in found] == [(2, 32.0), (2, 32.0)]


PAIRS = ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("in_use", "allocated", "islands"),
    [
        ((), 0, PAIRS),
        ((0, 2), 2, ((1,), (3,))),
        ((0, 1), 2, ((2, 3),)),
        ((), 2, ()),  # Slurm does not show which
        ((0, 1, 2, 3), 4, ()),
    ],
)
def test_free_gpus_are_told_by_island(in_use, allocated, islands):
    node = make_node("n1", gpu_count=4, gpus_allocated=allocated, gpus_in_use=in_use, gpu_islands=PAIRS)
    (found,) = free(node)
    assert (found.islands, found.topology) == (islands, PAIRS)


def test_of_gpus_that_slurm_will_give_to_others_nobody_knows_which():
    released = make_job(1, held=False, gpu_count=1)
    node = make_node("n1", gpu_count=4, gpu_islands=PAIRS)
    (found,) = free(node, jobs=(released,))
    assert (found.free_gpus, found.islands) == (3, ())


def test_what_members_ask_for_that_start_with_their_pilot_is_not_free():
    members = [candidate(1, mem_per_node_mib=GIB), candidate(2, "m2", mem_per_node_mib=GIB)]
    pilot, *waiting = behind_pilot(1, *members)
    waiting = [replace(job, state=JobState.PENDING, nodes="", reason="Dependency") for job in waiting]
    (found,) = free(make_node("n1", mem_mib=8 * GIB, cpus_allocated=4), jobs=(pilot, *waiting))
    assert (found.free_cpus, found.free_mem_gib) == (32 - 4 - 2 * 4, 6.0)
