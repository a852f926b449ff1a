"""What Muri relies on in Slurm, as cases that run on a real Slurm and on the twin's alike.

A difference that is found becomes a case here: first the real Slurm answers, then the virtual one has to.
"""

import json
from collections.abc import Callable
from types import FunctionType
from typing import Any, Protocol

from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError
from muri.slurm_plugin.records.cluster import Job, JobChange, JobState, Node

REMOVED = "gres/gpu:0,gres/muri:1"  # What takes a waiting job's GPUs away on every release that can


class World(Protocol):
    """A Slurm with nodes n1 to n4 of two GPUs each, and a user alice."""

    def submit(self, *, gpus: int = 0, node: str = "", hold: bool = False, begin_in_s: int = 0, requeue: bool = True,
               cpus: int = 1, seconds: int = 600, minutes: int = 0, dependency: str = "",
               licenses: str = "", tasks: int = 0, at_once: int = 0, mem_mib: int = 0,
               shares: bool = False) -> int:  # fmt: skip
        """Submit a job of alice's that sleeps so long, or an array of so many tasks with a throttle."""

    def layers(self) -> int:
        """How many jobs may share a CPU."""

    def job(self, job_id: int) -> Job:
        """A job as the gateway shows it."""

    def node(self, name: str) -> Node:
        """A node as the gateway shows it."""

    def wait(self, job_id: int, state: JobState) -> None:
        """Let time pass until a job is in a state."""

    def wait_reason(self, job_id: int, reason: str) -> None:
        """Let time pass until a job waits for a reason."""

    def until(self, reached: Callable[[], bool]) -> None:
        """Let time pass until something is so."""

    def settle(self) -> None:
        """Let some seconds pass, in which whatever can start does: to see that something does not."""

    def call(self, method: str, *arguments: Any) -> None:
        """Call the gateway."""

    def split_first(self, job_id: int, count: int) -> None:
        """Give the first waiting tasks of an array records of their own."""

    def release_by_user(self, job_id: int) -> None:
        """Let alice release her job."""

    def hold_by_admin(self, job_id: int) -> None:
        """Let root hold a job, as `scontrol hold` does."""


def _refused(world: World, *call: Any) -> GatewayError:
    try:
        world.call(*call)
    except GatewayError as error:
        return error
    raise AssertionError(f"{call} was not refused")


def _running(world: World, **asked: Any) -> int:
    """Submit a job and wait until it runs."""
    job_id = world.submit(**asked)
    world.wait(job_id, JobState.RUNNING)
    return job_id


def _waiting(world: World, job_id: int, reason: str) -> Job:
    """Let time pass until a job waits for a reason."""
    world.wait_reason(job_id, reason)
    job = world.job(job_id)
    assert job.state is JobState.PENDING
    return job


def _until_all(world: World, state: JobState, *jobs: int) -> None:
    """Let time pass until tasks of an array are in a state."""
    world.until(lambda: {world.job(job_id).state for job_id in jobs} == {state})


def a_hold_and_its_release_may_be_repeated(world: World) -> None:
    job_id = world.submit(hold=True)
    for _ in range(2):
        world.call("hold", job_id)
    job = world.job(job_id)
    assert (job.held, job.reason, job.priority) == (True, "JobHeldUser", 0)
    for _ in range(2):
        world.call("release", job_id)
    world.wait(job_id, JobState.RUNNING)
    world.call("release", job_id)
    world.call("cancel", job_id)
    world.wait(job_id, JobState.CANCELLED)
    world.call("release", job_id)


def a_running_job_cannot_be_held_by_the_gateway(world: World) -> None:
    job_id = _running(world)
    try:
        world.call("hold", job_id)
    except GatewayError as error:
        assert "no longer pending" in str(error) or "already started" in str(error).lower(), error
    assert world.job(job_id).state is JobState.RUNNING


def a_user_lifts_a_hold_of_the_gateway(world: World) -> None:
    job_id = world.submit(begin_in_s=3600)
    world.call("hold", job_id)
    world.release_by_user(job_id)
    job = world.job(job_id)
    assert not job.held
    assert job.begin_s > job.submit_s


def an_administrators_hold_shows_as_such(world: World) -> None:
    job_id = world.submit(begin_in_s=3600)
    world.hold_by_admin(job_id)
    job = world.job(job_id)
    assert (job.held, job.reason) == (True, "JobHeldAdmin")


def a_requeued_job_comes_back_and_waits(world: World) -> None:
    job_id = _running(world)
    world.call("requeue", job_id)
    world.wait(job_id, JobState.PENDING)
    job = world.job(job_id)
    assert (job.held, job.restart_count, job.nodes, job.start_s) == (False, 1, "", 0)
    assert job.begin_s > 0
    assert job.exit_code == 0


def a_job_requeued_with_a_hold_is_held(world: World) -> None:
    job_id = _running(world)
    world.call("requeue_hold", job_id)
    world.wait(job_id, JobState.PENDING)
    world.call("requeue_hold", job_id)
    job = world.job(job_id)
    assert (job.held, job.restart_count, job.reason) == (True, 1, "job_requeued_in_held_state")


def a_requeue_of_a_waiting_job_changes_nothing(world: World) -> None:
    job_id = world.submit(hold=True)
    world.call("requeue", job_id)
    job = world.job(job_id)
    assert (job.state, job.held, job.restart_count) == (JobState.PENDING, True, 0)


def a_job_that_may_not_be_requeued_is_not(world: World) -> None:
    job_id = _running(world, requeue=False)
    _refused(world, "requeue", job_id)
    assert world.job(job_id).state is JobState.RUNNING


def an_unknown_job_is_told_as_such(world: World) -> None:
    for method in ("hold", "release", "requeue", "requeue_hold"):
        error = _refused(world, method, 999_999)
        assert isinstance(error, NoSuchJobError), method
        assert "999999" in str(error)
    assert isinstance(_refused(world, "modify", 999_999, JobChange(cpu_count=1)), NoSuchJobError)
    world.call("cancel", 999_999)


def an_ended_job_cannot_be_changed(world: World) -> None:
    job_id = world.submit(seconds=0)
    world.wait(job_id, JobState.COMPLETED)
    assert isinstance(_refused(world, "modify", job_id, JobChange(cpu_count=2)), NoSuchJobError)
    for method in ("requeue", "requeue_hold", "cancel"):  # without an error, and without a second run
        world.call(method, job_id)
    assert world.job(job_id).state is JobState.COMPLETED


def a_cancelled_job_stays_cancelled(world: World) -> None:
    running, waiting = world.submit(), world.submit(hold=True)
    world.wait(running, JobState.RUNNING)
    for job_id in (running, waiting):
        world.call("cancel", job_id)
        world.wait(job_id, JobState.CANCELLED)
        world.call("cancel", job_id)
    assert world.job(waiting).end_s > 0


def of_a_running_job_only_words_limits_and_licenses_change(world: World) -> None:
    job_id = _running(world, minutes=10)
    _refused(world, "modify", job_id, JobChange(cpu_count=2, cpus_per_task=2))
    world.call("modify", job_id, JobChange(admin_comment="theirs muri:on", name="muri:8+12", time_limit_s=1200))
    job = world.job(job_id)
    assert (job.admin_comment, job.name, job.time_limit_s) == ("theirs muri:on", "muri:8+12", 1200)


def a_time_limit_is_rounded_up_to_minutes(world: World) -> None:
    job_id = world.submit(hold=True, minutes=10)
    world.call("modify", job_id, JobChange(time_limit_s=61))
    assert world.job(job_id).time_limit_s == 120


def a_change_that_slurm_refuses_changes_nothing(world: World) -> None:
    job_id = world.submit(hold=True, gpus=1)
    error = _refused(world, "modify", job_id, JobChange(required_nodes="nowhere"))
    assert "nvalid node name" in str(error)
    assert world.job(job_id).required_nodes == ""


def a_member_runs_beside_the_pilot_that_has_all_gpus(world: World) -> None:
    pilot = _running(world, gpus=2, node="n1")
    member = world.submit(gpus=1, hold=True, cpus=4)
    change = JobChange(gpu_request=REMOVED, required_nodes="n1", cpu_count=1, cpus_per_task=1,
                       dependency=f"after:{pilot}")  # fmt: skip
    world.call("modify", member, change)
    job = world.job(member)
    assert (job.gpu_count, job.gpu_request, job.cpu_count, job.cpus_per_task) == (0, REMOVED, 1, 1)
    world.call("release", member)
    world.wait(member, JobState.RUNNING)
    assert world.job(member).nodes == "n1"
    node = world.node("n1")
    assert (node.gpus_allocated, node.cpus_allocated) == (2, 2)


def a_member_gets_its_own_request_back(world: World) -> None:
    pilot = _running(world, gpus=2, node="n1")
    job_id = world.submit(gpus=1, hold=True, cpus=4, minutes=10)
    state = "theirs muri:on muri-state:" + json.dumps({"original": ["x'\"" * 8] * 30}, separators=(",", ":"))
    assert len(state) > 800
    world.call("modify", job_id, JobChange(gpu_request=REMOVED, required_nodes="n1", cpu_count=1, cpus_per_task=1,
                                           dependency=f"after:{pilot}", time_limit_s=3600, mem_per_node_mib=64,
                                           admin_comment=state))  # fmt: skip
    job = world.job(job_id)
    assert (job.mem_per_node_mib, job.admin_comment, job.held) == (64, state, True)
    world.call("modify", job_id, JobChange(gpu_request="gres/gpu:1", required_nodes="", cpu_count=4, cpus_per_task=4,
                                           dependency="", time_limit_s=600))  # fmt: skip
    job = world.job(job_id)
    assert (job.gpu_count, job.gpu_request, job.required_nodes, job.dependency) == (1, "gres/gpu:1", "", "")
    assert (job.cpu_count, job.cpus_per_task, job.time_limit_s) == (4, 4, 600)
    world.call("release", job_id)
    world.wait(job_id, JobState.RUNNING)
    assert world.job(job_id).nodes != "n1"


def a_job_waits_for_the_start_of_another(world: World) -> None:
    first = world.submit(hold=True)
    second = world.submit(dependency=f"after:{first}")
    _waiting(world, second, "Dependency")
    world.call("release", first)
    world.wait(second, JobState.RUNNING)


def gpus_are_given_out_once(world: World) -> None:
    first, second = world.submit(gpus=2, node="n2"), world.submit(gpus=1, node="n2")
    world.wait(first, JobState.RUNNING)
    _waiting(world, second, "Resources")
    world.call("cancel", first)
    world.wait(second, JobState.RUNNING)


def jobs_that_share_run_in_layers_of_all_cpus(world: World) -> None:
    jobs = [_running(world, node="n2", cpus=16, mem_mib=1000, shares=True) for _ in range(world.layers())]
    node = world.node("n2")
    assert (node.cpus_allocated, node.cpu_count, node.mem_allocated_mib) == (16, 16, 1000 * len(jobs))
    one_too_many = world.submit(node="n2", cpus=16, mem_mib=1000, shares=True)
    _waiting(world, one_too_many, "Resources")
    world.call("cancel", jobs[0])
    world.wait(one_too_many, JobState.RUNNING)


def a_job_that_shares_has_its_cpus_in_one_layer(world: World) -> None:
    for _ in range(world.layers()):
        _running(world, node="n2", cpus=9, mem_mib=1000, shares=True)
    _waiting(world, world.submit(node="n2", cpus=8, mem_mib=1000, shares=True), "Resources")


def small_jobs_that_share_fill_the_layers(world: World) -> None:
    for _ in range(2 * world.layers()):
        _running(world, node="n2", cpus=8, mem_mib=1000, shares=True)
    _waiting(world, world.submit(node="n2", mem_mib=1000, shares=True), "Resources")


def memory_is_never_shared(world: World) -> None:
    for _ in range(2):
        _running(world, node="n2", cpus=16, mem_mib=30_000, shares=True)
    _waiting(world, world.submit(node="n2", mem_mib=30_000, shares=True), "Resources")


def a_job_that_shares_starts_beside_none_that_does_not(world: World) -> None:
    plain = _running(world, node="n2", mem_mib=1000)
    sharing = world.submit(node="n2", mem_mib=1000, shares=True)
    _waiting(world, sharing, "Resources")
    world.call("cancel", plain)
    world.wait(sharing, JobState.RUNNING)


def a_job_that_does_not_share_takes_cpus_that_nobody_has(world: World) -> None:
    sharing = _running(world, node="n2", cpus=10, mem_mib=1000, shares=True)
    large = world.submit(node="n2", cpus=8, mem_mib=1000)
    _waiting(world, large, "Resources")
    world.call("cancel", sharing)
    world.wait(large, JobState.RUNNING)


def a_member_with_all_cpus_of_a_node_runs_beside_its_pilot(world: World) -> None:
    pilot = _running(world, gpus=1, node="n1", mem_mib=100, shares=True)
    members = [world.submit(gpus=1, hold=True, cpus=16, mem_mib=1000) for _ in range(2)]
    change = JobChange(gpu_request=REMOVED, required_nodes="n1", dependency=f"after:{pilot}", oversubscribe=True)
    for member in members:
        world.call("modify", member, change)
        world.call("release", member)
        world.wait(member, JobState.RUNNING)
        job = world.job(member)
        assert (job.cpu_count, job.cpus_per_task, job.mem_per_node_mib, job.oversubscribe) == (16, 16, 1000, True)
    node = world.node("n1")
    assert (node.gpus_allocated, node.cpus_allocated, node.mem_allocated_mib) == (1, 16, 2100)


def a_job_that_may_be_shared_stays_so(world: World) -> None:
    job_id = world.submit(hold=True)
    for shares in (True, False):
        world.call("modify", job_id, JobChange(oversubscribe=shares))
        assert world.job(job_id).oversubscribe
    world.call("release", job_id)
    world.wait(job_id, JobState.RUNNING)
    world.call("requeue", job_id)
    world.wait(job_id, JobState.PENDING)
    assert world.job(job_id).oversubscribe


def a_small_job_starts_behind_one_that_waits_for_resources(world: World) -> None:
    _running(world, gpus=2, node="n2", minutes=10)
    waiting, small = world.submit(gpus=2, node="n2", minutes=10), world.submit(node="n2", minutes=5)
    world.wait(small, JobState.RUNNING)
    assert world.job(waiting).state is JobState.PENDING


def a_job_goes_to_the_fullest_node_that_has_room(world: World) -> None:
    _running(world, gpus=1, node="n3")
    second = _running(world, gpus=1)
    assert world.job(second).nodes == "n3"


def a_job_leaves_neighboring_nodes_together(world: World) -> None:
    _running(world, gpus=2, node="n3")
    second = _running(world, gpus=1)
    assert world.job(second).nodes == "n4"


def tasks_of_an_array_leave_the_record_of_those_that_wait(world: World) -> None:
    record = world.submit(tasks=3, at_once=2)
    assert _waiting(world, record, "JobArrayTaskLimit").array
    _until_all(world, JobState.RUNNING, record + 1, record + 2)
    assert world.job(record + 1).array
    world.call("cancel", record + 1)
    _until_all(world, JobState.RUNNING, record)  # the last task keeps the record


def an_array_is_cancelled_as_a_whole(world: World) -> None:
    record = world.submit(tasks=3, at_once=1)
    _waiting(world, record, "JobArrayTaskLimit")
    world.call("cancel", record)
    _until_all(world, JobState.CANCELLED, record, record + 1)


def tasks_get_records_of_their_own_before_they_start(world: World) -> None:
    record = world.submit(tasks=4, hold=True)
    world.split_first(record, 2)
    waiting, first, second = (world.job(record + number) for number in range(3))
    assert [job.several_tasks for job in (waiting, first, second)] == [True, False, False]
    assert int(second.array_tasks) == int(first.array_tasks) + 1
    assert {(job.array_job_id, job.held, job.reason) for job in (waiting, first, second)} == {
        (record, True, "JobHeldUser")
    }
    world.split_first(record, 1)
    last = world.job(record)
    assert not last.several_tasks
    world.call("modify", first.job_id, JobChange(admin_comment="one"))
    world.call("modify", record, JobChange(admin_comment="last"))
    assert [world.job(record + number).admin_comment for number in range(4)] == ["last", "one", "", ""]
    world.call("release", record)
    world.wait(record, JobState.RUNNING)
    assert [world.job(record + number).state for number in (1, 2, 3)] == [JobState.PENDING] * 3
    world.call("requeue", record)
    world.wait(record, JobState.PENDING)


def a_task_that_cannot_start_stops_those_behind_it(world: World) -> None:
    world.call("extend_lease_by", 300)
    record = world.submit(tasks=3, licenses="muri_gate:1")
    world.split_first(record, 2)
    second = record + 2
    world.call("modify", second, JobChange(licenses=""))
    world.settle()
    assert world.job(second).state is JobState.PENDING
    world.hold_by_admin(second)  # Slurm drops a dependency on a start that has happened
    start = f"after:{world.job(second).name_in_slurm}"
    for kept in (record, record + 1):
        world.call("modify", kept, JobChange(dependency=start))
    assert {world.job(kept).dependency for kept in (record, record + 1)} == {start}
    world.call("release", second)
    world.wait(second, JobState.RUNNING)


def a_nice_value_is_given_and_taken_back(world: World) -> None:
    world.call("extend_lease_by", 300)
    job_id = world.submit(licenses="muri_gate:1")
    own = world.job(job_id).priority
    for nice in (7, 0):
        world.call("modify", job_id, JobChange(nice=nice))
        assert (world.job(job_id).nice, world.job(job_id).priority) == (nice, max(1, own - nice))


def a_waiting_job_behind_the_license_starts_when_the_lease_ends(world: World) -> None:
    world.call("extend_lease_by", 300)
    job_id = world.submit(licenses="muri_gate:1")
    assert not _waiting(world, job_id, "Licenses").held
    world.call("modify", job_id, JobChange(licenses=""))
    world.wait(job_id, JobState.RUNNING)
    other = world.submit(licenses="muri_gate:1")
    _waiting(world, other, "Licenses")
    world.call("end_lease")
    world.wait(other, JobState.RUNNING)


#: Every function of this file.
CASES: tuple[Callable[[World], None], ...] = tuple(
    each for name, each in list(globals().items()) if isinstance(each, FunctionType) and not name.startswith("_")
)
