"""Who is told that it could move to another group if running jobs were stopped."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import at_work
import pytest
from at_work import HOUR_S, candidate
from fake_slurm import FakeSlurm, make_node

from muri.policies.types import Policy
from muri.slurm_plugin.controller.assemble import policy_of
from muri.slurm_plugin.planning.asking import ASK_AGAIN_S, Proposals, proposed_moves
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job

NODES = [make_node(f"n{number}", gpu_count=1, gpus_allocated=1, cpus_allocated=5) for number in (1, 2)]


def behind_pilot(number: int, comment: str = f"{tags.CHECKPOINT_PREFIX}0") -> list[Job]:
    """A pilot and its only member on a node of their own; the member has declared a checkpoint."""
    member = candidate(2000 + number, f"m{number}", ",checkpoint=1", comment=comment)
    member = replace(member, admin_comment=member.admin_comment.replace("duration=100", "duration=3000"))
    return at_work.behind_pilot(number, member, time_limit_s=20 * HOUR_S)


def told(jobs: list[Job], stopping: Callable[[], Policy] | None = None) -> dict[int, str]:
    cycle, found = (each(jobs, NODES, policy="muri-jct") for each in (at_work.cycle_of, at_work.decided))
    assert not found.actions
    stopping = stopping or (lambda: policy_of(cycle.config, stopping=True))
    return Proposals(cycle.now_s, proposed_moves(found.preparation.request, found.view, 30.0, stopping)).notes(
        found.view
    )


ANOTHERS = candidate(1, "m3", user="bob", uid=1002)


def test_a_job_with_a_checkpoint_is_told_whom_it_could_join_so_that_another_starts():
    ((job_id, why),) = told([*behind_pilot(1), *behind_pilot(2), ANOTHERS]).items()
    assert job_id in {2001, 2002}
    assert f"could move to the GPUs of job {4003 - job_id}" in why
    assert "preemption.enabled" in why


@pytest.mark.parametrize(
    "jobs",
    [
        [*behind_pilot(1), *behind_pilot(2)],  # no job waits
        [*behind_pilot(1, ""), *behind_pilot(2, ""), ANOTHERS],  # no checkpoint in this run
        [*behind_pilot(1), ANOTHERS],  # no group to join
    ],
)
def test_otherwise_nobody_is_told_anything(jobs):
    assert told(jobs) == {}


def test_the_policy_is_not_asked_where_nobody_could_meet_anybody():
    carols = [replace(job, user="carol", uid=1003) for job in behind_pilot(2)]
    assert told([*behind_pilot(1), *carols, ANOTHERS], stopping=lambda: pytest.fail("it was asked")) == {}


def test_explain_tells_it_and_a_policy_that_fails_there_costs_no_cycle(make_controller, caplog):
    slurm = FakeSlurm([*behind_pilot(1), *behind_pilot(2), ANOTHERS], NODES)
    with make_controller(slurm, policy="muri-jct") as controller:
        told = [why for job in controller.cycle().jobs for why in job.reasons if "could move" in why]
        assert len(told) == 1
        policy_for = controller._policy_for

        def fails(priority_type: str, *, stopping: bool = False) -> Any:
            return policy_for("no such thing") if not stopping else 1 // 0

        controller._policy_for = fails
        status = controller.cycle()  # not asked again so soon
        assert [why for job in status.jobs for why in job.reasons if "could move" in why] == told
        slurm.now_s += ASK_AGAIN_S
        status = controller.cycle()
    assert not [why for job in status.jobs for why in job.reasons if "could move" in why]
    assert "proposals to move jobs are left out" in caplog.text
