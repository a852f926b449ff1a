"""Commands about one job ask slurmctld for that job and its group, not for the whole queue."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from fake_slurm import FakeSlurm, make_job, make_node

from muri.errors import UsageError
from muri.slurm_plugin.cli.admin import preempt
from muri.slurm_plugin.cli.look import explain, job_id_in, named
from muri.slurm_plugin.controller import assemble
from muri.slurm_plugin.controller.status import JobStatus
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import JobState

RUNNING = {"state": JobState.RUNNING, "held": False, "nodes": "n1"}
MEMBER = tags.STATE_PREFIX + tags.format_state(tags.MemberState(9, tags.Original("gres/gpu:1", "", 4, 4, 0, 3600)))


class ReadSlurm(FakeSlurm):
    """Notes what is read."""

    def queue(self):
        self.calls.append("queue")
        return super().queue()

    def one_job(self, job_id):
        found = super().one_job(job_id)
        self.calls[-1] = str(job_id)  # where the fake reads its queue
        return found


@pytest.fixture
def slurm(monkeypatch, tmp_path) -> FakeSlurm:
    """A waiting job, a group of two, an array, and a hundred others; what is read of them is noted."""
    members = [make_job(number, **RUNNING, admin_comment=f"muri:model=m {MEMBER}") for number in (1, 2)]
    pilot = make_job(9, **RUNNING, name="muri:1+2", admin_comment="muri-pilot:f00d:1,2")
    array = [make_job(30, array=True, array_job_id=30, array_tasks="4-9")]
    array += [make_job(31, array=True, array_job_id=30, array_tasks="3")]  # shown first, though its own id is higher
    others = [make_job(number) for number in range(100, 200)]
    fake = ReadSlurm([make_job(5), *members, pilot, *array, *others], [make_node("n1")])
    monkeypatch.setattr(assemble, "open_gateway", lambda kind: fake)
    monkeypatch.setenv("MURI_CONFIG", str(tmp_path / "muri.yaml"))
    (tmp_path / "muri.yaml").write_text(f"state_dir: {tmp_path}\nstatus_dir: {tmp_path}/status\n")
    return fake


def explained(*arguments: str) -> str:
    return CliRunner().invoke(explain, [*arguments], catch_exceptions=False).output


def test_a_waiting_job_is_read_alone(slurm):
    assert explained("5").startswith("Job 5 ")
    assert slurm.calls == ["5"]


def test_a_member_is_read_with_its_group(slurm):
    assert "It shares the GPUs of pilot job 9 with 2" in explained("1")
    assert slurm.calls == ["1", "9", "2"]


def test_a_pilot_job_is_told_by_its_members(slurm):
    slurm.jobs[9] = replace(slurm.jobs[9], name="train", gpu_count=1)  # its user may call it as he likes
    assert explained("9") == "Job 9 is the pilot job that holds 1 GPU for 1 and 2 of alice (muri explain 1).\n"
    assert json.loads(explained("9", "--json"))["is"].startswith("the pilot job that holds 1 GPU")
    slurm.jobs[2] = replace(slurm.jobs[2], state=JobState.COMPLETED)
    assert "for 1 of alice" in explained("9")
    slurm.jobs[9] = replace(slurm.jobs[9], admin_comment="muri-dryrun:beef")
    assert explained("9") == "Job 9 is a dry run that measures a model of alice.\n"


@pytest.mark.parametrize(("name", "tasks"), [("30", ["30_3", "30_[4-9]"]), ("30_5", ["30_[4-9]"]), ("30_3", ["30_3"])])
def test_an_array_is_read_by_its_id(slurm, name, tasks):
    told = json.loads(explained(name, "--json"))
    assert [job["task"] for job in (told if isinstance(told, list) else [told])] == tasks
    assert slurm.calls == ["30"]


def test_several_jobs_are_explained_in_turn(slurm):
    shown = explained("30_3", "5")
    assert shown.startswith("Job 30_3 ")
    assert "\nJob 5 " in shown
    with pytest.raises(UsageError, match=r"'' is not a job id\. Use"):
        explained("5", "")


def test_of_a_job_that_is_not_there_the_others_are_named(slurm):
    with pytest.raises(UsageError, match="such jobs now: 1, 2, 5, 30_"):
        explained("77")
    assert slurm.calls == ["77", "queue"]
    with pytest.raises(UsageError, match="For an ended job: muri report 77, or scontrol show job 77"):
        explained("77")


def test_a_job_to_be_stopped_is_read_alone(slurm):
    with pytest.raises(UsageError, match="cannot be stopped"):
        CliRunner().invoke(preempt, ["1", "--yes"], catch_exceptions=False)
    assert slurm.calls == ["1"]


@pytest.mark.parametrize("name", ["", "x", "_3", "-1", "1" * 11, "١٧"])
def test_what_is_no_jobs_name_is_refused(name):
    with pytest.raises(UsageError, match="is not a job"):
        job_id_in(name)
    assert job_id_in("4711_3") == job_id_in("4711") == 4711


def status(job_id: int, task: str = "") -> JobStatus:
    return JobStatus(job_id, "alice", "train", "", "waiting", "PENDING", task=task)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("7", [7]), ("12_3", [13]), ("12_6", [12]), ("12_11", [12]), ("12_5", []), ("12", [12, 13, 14]), ("13", [13]),
        ("12_[4-8:2,11]", [12]), ("121", [121]), ("8", []), ("x", []), ("12_x", []),
    ],
)  # fmt: skip
def test_a_user_names_jobs_as_slurm_does(name: str, found: list[int]) -> None:
    jobs = [status(7), status(12, "12_[4-8:2,11]"), status(13, "12_3"), status(14, "12_31"), status(121, "121_3")]
    assert [job.job_id for job in named(jobs, name)] == found
