"""The command `muri simulate`; lab/tests/sweep has the cases that it shares with `muri-lab sweep`."""

import json
from importlib.metadata import EntryPoints
from pathlib import Path

import pytest
from engine_builders import CPU, GPU, job

from muri.commands import run_command
from muri.pythons import THE_LAB
from muri.simulator.commands import simulate
from muri.simulator.model import Trace
from muri.simulator.traces.schema import write_trace


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Three jobs for one GPU; two of them interleave."""
    jobs = (job(1, 0.0, 400.0, GPU, name="a"), job(2, 10.0, 400.0, CPU, name="b"), job(3, 20.0, 400.0, GPU, name="a"))
    write_trace(Trace("t", jobs), tmp_path / "t.csv")
    return str(tmp_path / "t.csv")


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, float]]:
    assert run_command(simulate, [*words, "--nodes", "1", "--gpus-per-node", "1", "--json"]) == 0
    found: dict[str, dict[str, float]] = json.loads(capsys.readouterr().out)["policies"]
    return found


def test_policies_options_and_settings_reach_the_simulation(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    two = figures(capsys, trace, "--policy", "fifo,muri-s", "--option", "muri-s:preemption=false")
    assert two["muri-s"]["avg_jct_s"] < two["fifo"]["avg_jct_s"]
    alone = figures(capsys, trace, "--policy", "muri-s", "--option", "max_group_size=1")["muri-s"]
    assert alone["avg_jct_s"] == figures(capsys, trace, "--policy", "sjf")["sjf"]["avg_jct_s"]
    for words in (("--interval", "360"), ("--model", "live"), ("--unknown-durations",)):
        assert figures(capsys, trace, "--policy", "srsf", *words)["srsf"]["makespan_s"] >= 1200.0, words
    assert run_command(simulate, [trace, "--policy", "fifo"]) == 0
    assert "t: 3 jobs, 8 × 8 GPUs, model default" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no policy; say --policy with some of: auto"),
        (("--policy", "srft"), "unknown policy 'srft' (did you mean 'srtf'?)"),
        (("--policy", "fifo", "--option", "muri-s:a=1"), "--option for muri-s, which --policy does not name"),
        (("--policy", "fifo", "--model", "lvie"), "there is no model 'lvie'; valid are: default, live, reference"),
    ],
)
def test_wrong_input_is_named(
    words: tuple[str, ...], said: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(simulate, [trace, *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("model", ["live", "reference"])
def test_a_model_of_the_lab_says_how_the_lab_comes_here(
    model: str, trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muri.simulator.run.entry_points", lambda **_: EntryPoints())
    assert run_command(simulate, [trace, "--policy", "muri-s", "--model", model]) == 2
    assert capsys.readouterr().err == f"muri: the model {model} is in Muri's lab: {THE_LAB}\n"
