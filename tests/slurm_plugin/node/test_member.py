"""Requests of a member's own process to Slurm: it goes back to the queue once, and never against its user's will."""

from types import SimpleNamespace

import pytest
from virtual_clock import VirtualClock

from muri.group_spec import MemberSpec, Place
from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError, SlurmUnreachableError, slurm_error
from muri.slurm_plugin.node import membership
from muri.slurm_plugin.node import slurm_calls as node_commands
from muri.slurm_plugin.node.membership import SlurmMembership
from muri.slurm_plugin.node.slurm_calls import JobRecord
from muri.slurm_plugin.records import comment_tags as tags


def record(admin_comment: str) -> JobRecord:
    """What Slurm shows of job 7."""
    return JobRecord("7", "RUNNING", "", admin_comment)


@pytest.fixture
def answers(monkeypatch) -> list[str]:
    """What scontrol says, in turn; "" where it does as told. Its arguments are appended. A hold is the job's gate."""
    said: list[str] = []
    monkeypatch.setattr(membership, "job_record", lambda _job_id: record("muri:model=m muri-gate:hold"))

    def run(action: str, arguments: list[str]) -> str:
        words = said.pop(0)
        said.append(" ".join(arguments))
        if words:
            raise slurm_error(action, words)
        return ""

    monkeypatch.setattr(node_commands, "_COMMANDS", SimpleNamespace(run=run))
    return said


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        ("", "goes back to the queue"),
        ("Job is pending execution for job 7", "goes back to the queue"),
        ("Job/step already completing or completed for job 7", "Slurm is ending the job already"),
    ],
)
def test_a_member_whose_group_broke_goes_back_unless_it_is_cancelled(answers, capsys, words, outcome):
    answers.append(words)
    SlurmMembership().requeue("7", "the runtime is gone")
    assert outcome in capsys.readouterr().err
    assert answers == ["scontrol requeuehold incomplete 7"]


def test_other_refusals_are_the_callers_to_try_again(answers):
    answers.append("Access/permission denied")
    with pytest.raises(GatewayError, match="permission denied"):
        SlurmMembership().requeue("7", "the runtime is gone")


ORIGINAL = tags.Original("gres/gpu:1", "", 1, 1, 0, 0)
MEMBER = tags.STATE_PREFIX + tags.format_state(tags.MemberState(9, ORIGINAL))
PROMISED = tags.STATE_PREFIX + tags.format_state(tags.MemberState(9, ORIGINAL, accumulate_steps=4, min_speed=0.7))
PROMISED_PLACE = MemberSpec("7", solo_iteration_s=0.5, predicted_speed=0.9, accumulate_steps=4, min_speed=0.7)


@pytest.mark.parametrize(
    ("gate", "command"),
    [(" muri-gate:licence", "requeue"), (" muri-gate:hold", "requeuehold"), ("", "requeuehold")],
)
@pytest.mark.parametrize("way", ["broken", "memory", "stopped"])
def test_a_member_is_held_only_if_no_license_keeps_it_waiting(answers, monkeypatch, way, gate, command):
    monkeypatch.setattr(membership, "job_record", lambda _job_id: record(f"{MEMBER} muri-retry-memory:1{gate}"))
    monkeypatch.setattr(membership, "set_comment", lambda _name, _comment: None)
    answers.append("")
    member = SlurmMembership()
    {
        "broken": lambda: member.requeue("7", "the runtime is gone"),
        "memory": lambda: member.requeue_for_memory("7"),
        "stopped": lambda: member.requeue_stopped("7", 0),
    }[way]()
    assert answers == [f"scontrol {command} incomplete 7"]


def test_a_job_that_is_gone_does_not_go_back(answers, monkeypatch, capsys):
    def gone(_job_id):
        raise NoSuchJobError("no such job")

    monkeypatch.setattr(membership, "job_record", gone)
    SlurmMembership().requeue("7", "the runtime is gone")
    assert "Slurm is ending the job already" in capsys.readouterr().err
    assert answers == []


@pytest.mark.parametrize(
    "text",
    [b"", b"(null)", b"two\nlines", b"8" + b" " * 15 + b"of another job", b"caf\xe9 \xff", b"x" * 9000],
)
def test_a_job_is_read_whole_whatever_a_user_has_written(monkeypatch, text):
    line = b"%-16d%-16d%-32s%-32s%-32768.32768s%-32768.32768s\n"
    records = b"".join(
        line % (job_id, job_id, b"N/A", b"RUNNING", comment, text)
        for job_id, comment in ((8, b"of another task"), (7, text))
    )
    calls = SimpleNamespace(run=lambda _action, _arguments: node_commands.decoded(records))
    monkeypatch.setattr(node_commands, "_COMMANDS", calls)
    expected = b"" if text == b"(null)" else text[:32768]
    found = node_commands.job_record(7)
    assert (found.name, found.state, found.is_active) == ("7", "RUNNING", True)
    assert [node_commands.encoded(each) for each in (found.comment, found.admin_comment)] == [expected] * 2
    with pytest.raises(NoSuchJobError, match="cannot read job 6: squeue does not show it"):
        node_commands.job_record(6)


@pytest.mark.parametrize(
    ("state", "active"),
    [("RUNNING", True), ("COMPLETING", True), ("CONFIGURING", True), ("PREEMPTED", False), ("TIMEOUT", False)],
)
def test_a_job_is_there_until_it_has_ended_for_any_reason(state, active):
    assert JobRecord("7", state, "", "").is_active is active


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (MEMBER, Place("9", MemberSpec("7"))),
        (f'{PROMISED} muri-plan:{{"speed":0.9,"solo_iteration_s":0.5}}', Place("9", PROMISED_PLACE)),
        ("muri:model=m muri-state:{}", Place("", MemberSpec("7"))),
        ("muri:model=m", None),
        (NoSuchJobError("no such job"), None),
        (GatewayError("permission denied"), Place("", MemberSpec("7"))),
    ],
)
def test_a_member_asks_for_its_group_until_slurmctld_answers(monkeypatch, capsys, last, expected):
    answers = [SlurmUnreachableError("no answer")] * 30 + [last]

    def job_record(job_id: int) -> JobRecord:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return record(answer)

    monkeypatch.setattr(membership, "job_record", job_record)
    clock = VirtualClock()
    assert SlurmMembership(clock).await_place("7") == expected
    assert answers == []
    assert 1500.0 < clock() < 1700.0  # the pauses grow to a minute
    assert capsys.readouterr().err.count("waiting for slurmctld") == 30


def test_a_member_whose_group_broke_waits_for_slurmctld(answers, capsys):
    answers += ["Unable to contact slurm controller (connect failure)"] * 20
    answers.append("")
    clock = VirtualClock()
    SlurmMembership(clock).requeue("7", "the runtime is gone")
    assert 900.0 < clock() < 1100.0
    assert "waiting for slurmctld" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("job_id", "shown", "name"),
    [
        (7, [(7, 7, "N/A")], "7"),
        (7, [(7, 7, "3"), (9, 7, "1")], "7_3"),
        (9, [(9, 7, "1")], "9"),
        (7, [(7, 7, "4-9%2"), (9, 7, "1")], "7"),
    ],
)
def test_the_last_task_of_an_array_is_not_taken_for_all_of_them(monkeypatch, job_id, shown, name):
    text = "".join(f"{own:<16}{array:<16}{task:<32}{'RUNNING':<32}{'':<65536}\n" for own, array, task in shown)
    monkeypatch.setattr(node_commands, "_COMMANDS", SimpleNamespace(run=lambda _action, _arguments: text))
    assert node_commands.job_record(job_id).name == name
