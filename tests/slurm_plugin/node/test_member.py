"""What a member's own process asks of Slurm: it goes back to the queue once, and never against its user's will."""

from types import SimpleNamespace

import pytest
from virtual_clock import VirtualClock

from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError, SlurmUnreachableError, slurm_error
from muri.slurm_plugin.node import membership
from muri.slurm_plugin.node import slurm_calls as node_commands
from muri.slurm_plugin.node.membership import SlurmMembership


@pytest.fixture
def answers(monkeypatch) -> list[str]:
    """What scontrol says, in turn; "" where it does as told. Its arguments are appended."""
    said: list[str] = []

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


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("muri:model=m muri-state:{}", True),
        ("muri:model=m", False),
        (NoSuchJobError("no such job"), False),
        (GatewayError("permission denied"), True),
    ],
)
def test_a_member_asks_for_its_group_until_slurmctld_answers(monkeypatch, capsys, last, expected):
    answers = [SlurmUnreachableError("no answer")] * 30 + [last]

    def job_field(job_id: int, field: str) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(membership, "job_field", job_field)
    clock = VirtualClock()
    assert SlurmMembership(clock).expects_group("7") is expected
    assert (clock(), answers) == (300.0, [])
    assert capsys.readouterr().err.count("waiting for slurmctld") == 30
