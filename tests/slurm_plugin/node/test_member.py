"""What a member's own process asks of Slurm: it goes back to the queue once, and never against its user's will."""

from types import SimpleNamespace

import pytest

from muri.slurm_plugin.gateway.base import GatewayError, slurm_error
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
