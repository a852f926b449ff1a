"""`muri preempt`: its refusals, its question, its effect."""

import os
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from fake_slurm import FakeSlurm, make_job, make_node

from muri.errors import UsageError
from muri.slurm_plugin.cli.admin import preempt
from muri.slurm_plugin.controller import assemble as open_gateway
from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.node import membership as member
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.roles import Role, read_job

MARK = "muri:model=m1,batch-size=8,duration=100,checkpoint=1"


@pytest.fixture
def slurm(monkeypatch, tmp_path) -> FakeSlurm:
    running = {"state": JobState.RUNNING, "held": False, "nodes": "n1", "admin_comment": MARK}
    jobs = [make_job(1, comment="muri-checkpoint:0", **running), make_job(2, **running)]
    fake = FakeSlurm(jobs, [make_node("n1")])
    monkeypatch.setattr(open_gateway, "open_gateway", lambda kind: fake)
    monkeypatch.setattr(member, "mark_stopped", lambda job_id, run: fake.calls.append(f"stopped {job_id} in run {run}"))
    monkeypatch.setenv("MURI_CONFIG", str(tmp_path / "muri.yaml"))
    (tmp_path / "muri.yaml").write_text(f"state_dir: {tmp_path}\n")
    return fake


def test_it_marks_the_run_and_requeues(slurm):
    done = CliRunner().invoke(preempt, ["1", "--yes"], catch_exceptions=False)
    assert done.output == "job 1 is being saved and goes back to the queue\n"
    assert slurm.calls == ["stopped 1 in run 0", "modify", "requeue_hold"]
    assert read_job(slurm.jobs[1]).role is Role.CANDIDATE


def test_an_administrator_closes_the_license_gate_first_and_makes_no_hold(slurm):
    slurm.jobs[1] = replace(slurm.jobs[1], admin_comment=f"{MARK} muri-gate:licence")
    CliRunner().invoke(preempt, ["1", "--yes"], catch_exceptions=False)
    assert slurm.calls == ["stopped 1 in run 0", "modify", "requeue"]
    assert slurm.jobs[1].licenses == "muri_gate:2"  # Another request than it will have in the queue
    assert not slurm.jobs[1].held


STATE = tags.format_state(tags.MemberState(9, tags.Original("gres/gpu:1", "", 4, 4, 0, 3600)))


@pytest.mark.parametrize(
    ("comment", "command", "role"),
    [
        (f"{MARK} muri-gate:licence", "requeue", Role.RELEASED),
        (f"{MARK} muri-gate:open", "requeue", Role.RELEASED),
        # Where Muri holds jobs, a hold of his would look like an administrator's.
        (f"{MARK} muri-gate:open muri-state:{STATE}", "requeue_hold", Role.MEMBER),
    ],
)
def test_a_user_who_may_not_close_the_gate_can_stop_the_job(slurm, monkeypatch, comment, command, role):
    slurm.jobs[1] = replace(slurm.jobs[1], admin_comment=comment)
    monkeypatch.setattr(slurm, "modify", Mock(side_effect=GatewayError("Access/permission denied")))
    CliRunner().invoke(preempt, ["1", "--yes"], catch_exceptions=False)
    assert slurm.calls == ["stopped 1 in run 0", command]
    assert read_job(slurm.jobs[1]).role is role
    assert read_job(slurm.jobs[1]).gated is (role is Role.MEMBER)


def test_no_means_no(slurm):
    done = CliRunner().invoke(preempt, ["1"], input="n\n")
    assert done.exit_code == 1
    assert "Stop job 1" in done.output
    assert slurm.calls == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["2", "--yes"], "has not called muri.checkpoint in this run"),
        (["3", "--yes"], "Slurm knows no job 3"),
    ],
)
def test_refusals_say_why(slurm, arguments, said):
    with pytest.raises(UsageError, match=said):
        CliRunner().invoke(preempt, arguments, catch_exceptions=False)
    assert slurm.calls == []


@pytest.mark.parametrize(("age_s", "warned"), [(10.0, False), (5000.0, True)])
def test_it_warns_where_no_controller_would_resume_the_job(slurm, tmp_path, age_s, warned):
    status = tmp_path / "status.json"
    status.write_text("{}")
    os.utime(status, (time.time() - age_s,) * 2)
    done = CliRunner().invoke(preempt, ["1", "--yes"], catch_exceptions=False)
    assert ("or for `muri drain`" in done.stderr) is warned
    assert "is being saved" in done.stdout
