"""Who is told that it could move to another group if running jobs were stopped."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_slurm import FOUR_KINDS, GPUS_REMOVABLE, NOW_S, FakeSlurm, make_job, make_node

from muri.policies.types import Policy
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.assemble import policy_of
from muri.slurm_plugin.planning.cycle_input import CycleInput, Knowledge
from muri.slurm_plugin.planning.decision import decide
from muri.slurm_plugin.planning.proposals import ASK_AGAIN_S, Proposals, proposed_moves
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobState, Snapshot
from muri.slurm_plugin.records.roles import view_of

HOUR_S = 3600


def behind_pilot(number: int, comment: str = f"{tags.CHECKPOINT_PREFIX}0") -> list[Job]:
    """A pilot and its only member on a node of their own; the member has declared a checkpoint."""
    at_work = {"state": JobState.RUNNING, "held": False, "reason": "", "nodes": f"n{number}", "start_s": NOW_S - 600}
    pilot, member = 1000 + number, 2000 + number
    state = tags.MemberState(pilot, tags.Original("gres/gpu:1", "", 4, 4, 0, HOUR_S), limit_s=HOUR_S)
    mark = f"muri:model=m{number},batch-size=8,duration=3000,checkpoint=1 {tags.STATE_PREFIX}{tags.format_state(state)}"
    tag = tags.PILOT_PREFIX + tags.format_pilot(f"t{number}", (member,))
    return [
        make_job(pilot, time_limit_s=20 * HOUR_S, admin_comment=tag, **at_work),
        make_job(
            member, gpu_count=0, gpu_request="", cpu_count=1, required_nodes=f"n{number}", time_limit_s=HOUR_S,
            admin_comment=mark, comment=comment, **at_work,
        ),
    ]  # fmt: skip


def told(jobs: list[Job], stopping: Callable[[], Policy] | None = None) -> dict[int, str]:
    nodes = tuple(make_node(f"n{number}", gpu_count=1, gpus_allocated=1, cpus_allocated=5) for number in (1, 2))
    view = view_of(Snapshot(NOW_S, "c", "26.05", tuple(jobs), nodes, gpu_removal=GPUS_REMOVABLE))
    knowledge = Knowledge({profile.key: profile for profile in FOUR_KINDS})
    settings = Config(policy="muri-jct")
    found = decide(CycleInput(view, knowledge, settings), policy_of(settings))
    assert not found.actions
    stopping = stopping or (lambda: policy_of(settings, stopping=True))
    moves = proposed_moves(found.preparation.request, found.view, 30.0, stopping)
    return Proposals(NOW_S, moves).told(found.view)


ANOTHERS = make_job(1, user="bob", uid=1002, admin_comment="muri:model=m3,batch-size=8,duration=100")


def test_a_job_with_a_checkpoint_is_told_whom_it_could_join_so_that_another_starts():
    ((job_id, why),) = told([*behind_pilot(1), *behind_pilot(2), ANOTHERS]).items()
    assert job_id in {2001, 2002}
    assert f"could move to the GPUs of job {4003 - job_id}" in why
    assert "preemption.enabled" in why


@pytest.mark.parametrize(
    "jobs",
    [
        [*behind_pilot(1), *behind_pilot(2)],  # nobody waits
        [*behind_pilot(1, ""), *behind_pilot(2, ""), ANOTHERS],  # no checkpoint in this run
        [*behind_pilot(1), ANOTHERS],  # nobody to join
    ],
)
def test_otherwise_nobody_is_told_anything(jobs):
    assert told(jobs) == {}


def test_the_policy_is_not_asked_where_nobody_could_meet_anybody():
    carols = [replace(job, user="carol", uid=1003) for job in behind_pilot(2)]
    assert told([*behind_pilot(1), *carols, ANOTHERS], stopping=lambda: pytest.fail("it was asked")) == {}


def test_explain_tells_it_and_a_policy_that_fails_there_costs_no_cycle(make_controller, caplog):
    nodes = [make_node(f"n{number}", gpu_count=1, gpus_allocated=1, cpus_allocated=5) for number in (1, 2)]
    slurm = FakeSlurm([*behind_pilot(1), *behind_pilot(2), ANOTHERS], nodes)
    with make_controller(slurm, policy="muri-jct") as controller:
        told = [why for job in controller.cycle().jobs for why in job.reasons if "could move" in why]
        assert len(told) == 1
        policy_for = controller._policy_for

        def fails(priority_type: str, *, stopping: bool = False) -> Any:
            return policy_for("no such thing") if not stopping else 1 // 0

        controller._policy_for = fails
        status = controller.cycle()  # nobody is asked again so soon
        assert [why for job in status.jobs for why in job.reasons if "could move" in why] == told
        slurm.now_s += ASK_AGAIN_S
        status = controller.cycle()
    assert not [why for job in status.jobs for why in job.reasons if "could move" in why]
    assert "nobody is told who could move" in caplog.text
