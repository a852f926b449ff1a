"""What a killed controller left half submitted is cancelled; what merely looks like it in a user's comment is not."""

import pytest
from fake_slurm import NOW_S, FakeSlurm, make_job, make_node

from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.cycle import cycle_input
from muri.slurm_plugin.planning.actions import Cancel, ReturnToQueue
from muri.slurm_plugin.planning.repairs import reconcile

HELD = {"admin_comment": "", "submit_s": NOW_S - 100, "job_id": 9}
OWN = {**HELD, "name": "muri-host", "comment": "muri-host:abc:1,2"}


def repairs(*jobs):
    slurm = FakeSlurm([make_job(**job) for job in jobs], [make_node("n1")])
    return reconcile(cycle_input(slurm.snapshot(), None, Config()))


@pytest.mark.parametrize("fields", [{}, {"name": "muri-dryrun", "comment": "muri-dryrun:abc"}])
def test_a_job_of_muris_that_was_never_tagged_is_cancelled(fields):
    assert repairs({**OWN, **fields}) == (Cancel(9, "its submission was cut off"),)


@pytest.mark.parametrize(
    "fields",
    [{"name": "train"}, {"comment": "muri-hosts are fine"}, {"held": False, "reason": ""}, {"submit_s": NOW_S - 30}],
)
def test_others_are_left_alone(fields):
    assert repairs({**OWN, **fields}) == ()


def test_it_comes_after_all_other_repairs():
    stopped = {"admin_comment": "muri:on", "comment": "muri-stopped:0", "restart_count": 1, "begin_s": NOW_S + 60}
    kinds = [type(action) for action in repairs({**OWN, "job_id": 1}, {**stopped, "job_id": 2})]
    assert kinds == [ReturnToQueue, Cancel]


def test_a_job_that_may_start_in_a_moment_is_not_delayed_anew_in_each_cycle():
    """Muri lets a requeued job start two seconds later; a cycle each half second would put that off for ever."""
    gated = {"admin_comment": "muri:on muri-gate:licence", "licenses": "muri_gate:1", "held": False}
    requeued = {"job_id": 1, "restart_count": 1, **gated}
    assert [type(action) for action in repairs({**requeued, "begin_s": NOW_S + 60})] == [ReturnToQueue]
    assert repairs({**requeued, "begin_s": NOW_S + 2}) == ()
