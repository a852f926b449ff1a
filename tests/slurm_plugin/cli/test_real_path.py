"""What `muri doctor` makes of what became of the jobs that it tried with; tests/slurm takes the real way."""

import pytest
from fake_slurm import make_node

from muri.slurm_plugin.cli.doctor_slurm import LOAD, Level, examine_submission, judge_job_submit, judge_removal
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.gateway.base import GatewayError, GatewayUnavailableError
from muri.slurm_plugin.records.limits import TriedForm

NODES = (make_node("n1"), make_node("n2"), make_node("login", gpu_count=0))


class Commands:
    def __init__(self, answer: str | Exception) -> None:
        self._answer = answer

    def run(self, action: str, arguments: object) -> str:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(
    ("answer", "level"),
    [
        ("  --muri[=KEY=VALUE,...]  interleave", Level.OK),
        ("  --mem=MB", Level.PROBLEM),
        (GatewayError("plugstack.conf cannot be read"), Level.PROBLEM),
        (GatewayUnavailableError("no sbatch"), None),
    ],
)
def test_whether_sbatch_knows_the_option(answer, level) -> None:
    assert [finding.level for finding in examine_submission(Commands(answer))] == ([level] if level else [])


def test_gpus_that_can_be_taken_away_in_some_form_are_enough() -> None:
    forms = (TriedForm("--gres=gpu:N", "gres/gpu:0"), TriedForm("--gpus=N", why="Slurm accepts it and keeps the GPU"))
    finding = judge_removal(forms, NODES)
    assert finding.level is Level.OK
    assert finding.text == "can be taken away where asked for by --gres=gpu:N; jobs with --gpus=N run alone"


def test_where_no_group_can_form_that_is_a_problem_and_what_to_do_is_said() -> None:
    finding = judge_removal((TriedForm("--gpus=N", why="a"), TriedForm("--gres=gpu:N", why="the GPU is kept")), NODES)
    assert finding.level is Level.PROBLEM
    assert "no group can form" in finding.text
    assert "the GPU is kept" in finding.text
    assert finding.lines[0] == "GresTypes=gpu,muri"
    assert finding.lines[-1] == "NodeName=n[1-2] Name=muri Count=64 Flags=CountOnly"
    assert judge_removal((), NODES).level is Level.WARNING


@pytest.mark.parametrize(
    ("comment", "gate", "level", "words"),
    [
        ("muri:on muri-gate:licence", "licence", Level.OK, "kept waiting by licence"),
        ("muri:on muri-gate:hold", "hold", Level.OK, "kept waiting by hold"),
        ("muri:on muri-gate:open", "licence", Level.WARNING, "no controller is running"),
        ("muri:on muri-gate:hold", "licence", Level.PROBLEM, "by hold, muri.yaml by licence"),
        ("site=x", "licence", Level.PROBLEM, "not tagged"),
    ],
)
def test_what_job_submit_wrote(comment, gate, level, words) -> None:
    finding = judge_job_submit(comment, Config(gate=gate))
    assert finding.level is level
    assert words in finding.text
    assert finding.lines == ((LOAD,) if "not tagged" in words else ())
