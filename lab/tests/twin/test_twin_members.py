"""Members of a group stay in their own jobs: what the twin's nodes do at their start and at a placeholder's end."""

from dataclasses import replace
from typing import Any, Literal

import pytest

from muri.group_spec import GroupSpec, MemberSpec
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import JobChange, JobState
from muri_lab.twin.clock import VirtualTime
from muri_lab.twin.gateway import VirtualGateway
from muri_lab.twin.programs import NodeSide, Placeholder, TrainingScript, Work
from muri_lab.twin.sharing import Iteration, Sharing
from muri_lab.twin.site import Site, plain_nodes, shared_cpus
from muri_lab.twin.slurm import VirtualSlurm
from muri_lab.twin.submission import Submission, sbatch

CPU = (0.0, 0.9, 0.1, 0.0)
GPU = (0.0, 0.1, 0.9, 0.0)
STUBBORN_S = 60.0


class Group:
    """A placeholder with all CPUs of its node to be shared, and members that keep their requests."""

    def __init__(
        self, *works: Work, cpus: int = 16, node_cpus: int = 16, discipline: Literal["fair", "plain"] = "fair"
    ) -> None:
        self._discipline = discipline
        self.time = VirtualTime(1_700_000_000.0)
        self.slurm = VirtualSlurm(self.time, Site(plain_nodes(1, 1, node_cpus, 64_000), shared_cpus()))
        self.nodes = NodeSide(self.slurm, Sharing())
        self.gateway = VirtualGateway(self.nodes)
        self.members = [self._submit(work, cpus) for work in works]
        self.pilot = self._start_pilot()
        for member in self.members:
            self._give(member)
        self.time.sleep(10.0)

    def _submit(self, work: Work, cpus: int) -> int:
        mark = "model=m,batch-size=8"
        asked = Submission(self.time.now_s, "alice", 1001, work, mark, cpus_per_task=cpus, mem_per_node_mib=1000)
        self.slurm.lease_end_s = self.time.now_s + 10_000
        return sbatch(self.nodes, asked)

    def _start_pilot(self) -> int:
        members = tuple(MemberSpec(str(member)) for member in self.members)
        placeholder = Placeholder(self.nodes, GroupSpec(members, discipline=self._discipline, poll_s=5.0))
        asked = replace(
            self.slurm.jobs[self.members[0]], cpu_count=1, cpus_per_task=1, mem_per_node_mib=100, licenses="",
            admin_comment=tags.PILOT_PREFIX + tags.format_pilot("t", tuple(self.members)), oversubscribe=True,
        )  # fmt: skip
        pilot = self.slurm.submit(asked, placeholder)
        self.time.sleep(3.0)
        assert self.slurm.jobs[pilot].state is JobState.RUNNING
        return pilot

    def _give(self, member: int) -> None:
        job = self.slurm.jobs[member]
        original = tags.Original("gres/gpu:1", "", job.cpu_count, job.cpus_per_task, "", job.mem_per_node_mib, 0)
        state = tags.format_state(tags.MemberState(self.pilot, original))
        comment = tags.with_token(job.admin_comment, tags.STATE_PREFIX, state)
        self.gateway.modify(
            member,
            JobChange(
                gpu_request="gres/gpu:0,gres/muri:1", required_nodes="n1", dependency=f"after:{self.pilot}",
                licenses="", admin_comment=tags.with_token(comment, tags.GRANT_PREFIX, str(self.pilot)),
                oversubscribe=True,
            ),
        )  # fmt: skip

    def script(self, member: int) -> TrainingScript:
        program = self.slurm.ledger[member].program
        assert isinstance(program, TrainingScript)
        return program

    def states(self) -> list[JobState]:
        return [self.slurm.jobs[member].state for member in self.members]

    @property
    def free_gpus(self) -> int:
        return self.slurm.free["n1"].gpus

    def until_free(self) -> float:
        """How long it takes until Slurm may give the GPU away."""
        begun_s = self.time.now_s
        while not self.free_gpus:
            assert self.time.now_s < begun_s + 100
            self.time.sleep(0.1)
        return self.time.now_s - begun_s


def work(stages: tuple[float, float, float, float] = GPU, iterations: int = 300, **changes: Any) -> Work:
    return Work(Iteration(stages, 1.0), iterations, **changes)


def test_members_keep_their_cpus_and_share_them_in_layers() -> None:
    group = Group(work(), work(CPU))
    assert group.states() == [JobState.RUNNING] * 2
    assert [group.slurm.jobs[member].cpu_count for member in group.members] == [16, 16]
    assert all(group.script(member).runtime is not None for member in group.members)
    node = group.slurm.shown_nodes()[0]
    assert (node.cpus_allocated, node.mem_allocated_mib, node.gpus_allocated) == (16, 2100, 1)


def test_a_member_ends_as_any_job_and_the_placeholder_with_the_last() -> None:
    group = Group(work(iterations=20), work(CPU, iterations=60))
    group.time.sleep(400.0)
    assert group.states() == [JobState.COMPLETED] * 2
    assert group.slurm.jobs[group.pilot].state is JobState.COMPLETED
    assert group.free_gpus == 1


def test_a_placeholder_that_is_cancelled_puts_its_members_back_first() -> None:
    group = Group(work(), work(CPU))
    group.slurm.cancel(group.pilot, "user")
    assert group.until_free() < 2.0
    assert group.states() == [JobState.PENDING] * 2
    assert not any(group.slurm.jobs[member].held for member in group.members)  # the license keeps them


@pytest.mark.parametrize("how", ["killed", "crashed", "cancelled"])
def test_no_process_outlives_the_gpus_of_its_placeholder(how: str) -> None:
    group = Group(work(stop_s=STUBBORN_S), work(CPU))
    run = group.slurm.ledger[group.pilot].run
    program = group.slurm.ledger[group.pilot].program
    assert run is not None
    assert isinstance(program, Placeholder)
    if how == "cancelled":
        group.slurm.cancel(group.pilot, "user")
    elif how == "crashed":
        program.crash()
    else:
        program.kill()
        group.slurm.exit(run, 137)
    assert 10.0 <= group.until_free() < 12.0
    assert group.script(group.members[0]).grant is None
    assert not any(group.nodes.grants.values())
    assert group.states() == [JobState.PENDING] * 2


def test_a_placeholder_waits_for_slurmctld_before_its_members_are_killed() -> None:
    group = Group(work())
    run = group.slurm.ledger[group.pilot].run
    assert run is not None
    group.slurm.ledger[group.pilot].program.kill()
    group.slurm.go_away()
    group.slurm.exit(run, 137)
    group.time.sleep(60.0)
    assert group.script(group.members[0]).trains  # without turns
    group.slurm.come_back()
    group.until_free()
    assert group.states() == [JobState.PENDING]


@pytest.mark.parametrize("pilot", [None, "999"], ids=["without the word", "of another job"])
def test_a_member_without_a_grant_goes_back_and_never_runs_its_script(pilot: str | None) -> None:
    group = Group(work())
    member = group.members[0]
    group.slurm.requeue(member, "member")
    group.time.sleep(2.0)
    comment = tags.with_token(group.slurm.jobs[member].admin_comment, tags.GRANT_PREFIX, pilot)
    group.gateway.modify(member, JobChange(admin_comment=comment, start_now=True))
    group.time.sleep(10.0)
    job = group.slurm.jobs[member]
    assert (job.state, job.restart_count) == (JobState.PENDING, 2)
    assert not group.script(member).trains


def test_a_member_that_never_attaches_keeps_its_gpu() -> None:
    group = Group(work(iterations=100, uses_muri=False))
    group.time.sleep(80.0)
    assert group.slurm.jobs[group.pilot].state is JobState.RUNNING
    group.time.sleep(120.0)
    assert group.states() == [JobState.COMPLETED]
    assert group.slurm.jobs[group.pilot].state is JobState.COMPLETED


def test_members_on_the_same_cpus_slow_each_other_and_others_do_not() -> None:
    for node_cpus, least, most in ((1, 0.9, 1.2), (4, 1.7, 2.0)):
        group = Group(work(CPU), work(CPU), cpus=1, node_cpus=node_cpus, discipline="plain")
        at_work = group.nodes.runtimes[group.pilot].at_work.values()
        assert least < sum(member.speed for member in at_work) < most
