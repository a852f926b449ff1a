"""The page of the papers can be written from its table, and everything that the table names exists and runs."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from muri.cli import cli
from muri_lab import papers_page as page
from muri_lab.benchmarks.papers import frame, horus_slowdown, muri, sjf_bsbf_workload, synergy_traces
from muri_lab.benchmarks.papers.__main__ import experiments, main
from muri_lab.benchmarks.papers.frame import RESULTS
from muri_lab.benchmarks.papers.muri import SMALL
from muri_lab.cli import cli as lab
from muri_lab.experiments.experiment import experiment_names, load_experiment

ROOT = Path(__file__).resolve().parents[3]
ROWS = [(name, row) for name in page.PAPERS for row in page.read_rows(name)]
COMMANDS = sorted({row.command for _, row in ROWS if row.command})
SIX_JOBS = "".join(SMALL.read_text().splitlines(keepends=True)[:7])
SIMULATED = [name for name, experiment in experiments().items() if experiment.run_on]
SLOW = {"horus-table6", "muri-fig13", "synergy-fig11", "synergy-fig13"}


def test_the_page_can_be_written_and_its_links_lead_somewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "PAGE", tmp_path / "papers.md")
    assert CliRunner().invoke(page.papers_page, standalone_mode=False).exit_code == 0
    text = (tmp_path / "papers.md").read_text()
    assert text == page.page()
    links = set(re.findall(r"\]\(\.\./([^)#]+)", text))
    assert len(links) > 50 and not [link for link in sorted(links) if not (ROOT / link).exists()]


def test_every_named_piece_of_code_exists():
    for dotted in sorted({name for _, row in ROWS for name in row.here}):
        page.find(dotted)
    with pytest.raises(AttributeError):
        page.find("muri.policies.schedulers.no_such_order")
    with pytest.raises(ImportError):
        page.find("no_such_package.module")


def test_rows_quote_other_results_as_they_are_stored():
    scale = json.loads((RESULTS.parent / "scale.json").read_text())
    figures = page.quoted()
    assert figures["decision_s"] == f"{scale['decide-10k']['figures']['cpu_s']:.1f}"
    assert figures["hand_over_processes"] == f"{scale['hand-over-processes']['figures']['p50_us']:.0f}"
    assert page.quote("within {decision_s} s {", figures) == f"within {figures['decision_s']} s {{"
    texts = "".join(path.read_text() for path in page.FOLDER.glob("*.yaml"))
    assert sorted(name for name in figures if f"{{{name}}}" not in texts) == [], "no row quotes them"
    with pytest.raises(SystemExit, match=r"Table 0: .* has no figure 'decision'"):
        page._with_figures(page.Row(place="Table 0", kind="table", what="w", open="o"), "{decision}")


def options_of(command, words):
    """Return a command's options and the words after its name."""
    context = click.Context(command)
    while words and isinstance(command, click.Group) and command.get_command(context, words[0]):
        command, words = command.get_command(context, words[0]), words[1:]
    return {name for parameter in command.params for name in parameter.opts}, words


def test_every_named_command_exists():
    for command in COMMANDS:
        first, *words = shlex.split(command)
        assert "--help" not in words, f"{command}: a help page shows nothing of what the row claims"
        if first == "sbatch":  # its option's grammar is tested where it is defined
            assert words[0].startswith("--muri")
        elif first in ("muri", "muri-lab"):
            known, rest = options_of(cli if first == "muri" else lab, words)
            assert len(rest) < len(words), f"{first} has no command {words[0]}"
            assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= known
            if words[0] == "experiment":
                assert rest[0] in experiment_names()
        elif words[:2] == ["-m", "muri_lab.benchmarks.papers"]:
            assert words[2] in experiments()
        else:
            assert (first, words[0]) == ("python", "-m")
            assert importlib.util.find_spec(words[1])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command",
    [
        command
        for command in COMMANDS
        if command.startswith("python -m muri_lab.benchmarks.") and "papers" not in command
    ],
)
def test_a_script_that_a_row_names_has_the_options(command):
    _, _, module, *words = shlex.split(command)
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(word.partition("=")[0] in done.stdout for word in words if word.startswith("--"))


def kept_figures(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in SLOW)) for name in sorted(experiments())]
)
def test_an_experiment_runs_and_its_figures_are_those_that_are_kept(name):
    done = CliRunner().invoke(main, [name, "--quick", "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    document, kept = json.loads(done.stdout), kept_figures(name)
    assert document["rows"] and document["difference"] and document["split"]
    assert [document[text] for text in ("place", "title", "split")] == [
        kept[text] for text in ("place", "title", "split")
    ]
    assert {row["figure"] for row in document["rows"]} <= {row["figure"] for row in kept["rows"]}
    published = {(row["case"], row["figure"]): row["published"] for row in kept["rows"]}
    for row in document["rows"]:
        assert published.get((row["case"], row["figure"]), row["published"]) == row["published"]


@pytest.mark.parametrize("name", SIMULATED)
def test_the_figures_that_are_kept_are_of_the_traces_that_the_published_ones_are_of(name, tmp_path):
    """Small traces by the names of the published ones give the same cases, beside the same published figures."""
    small = [tmp_path / f"{trace}.csv" for trace in load_experiment(name.removeprefix("muri-")).traces]
    for path in small:
        path.write_text(SIX_JOBS)
    outcome, kept = experiments()[name].run_on(small), kept_figures(name)
    told = [(row.case, row.figure, row.unit, row.published) for row in outcome.rows]
    assert told == [(row["case"], row["figure"], row["unit"], row["published"]) for row in kept["rows"]]
    assert outcome.difference == kept["difference"]


def test_an_experiment_that_lacks_a_trace_names_it_and_keeps_nothing(tmp_path, monkeypatch):
    for module in (muri, frame):
        monkeypatch.setattr(module, "TRACES" if module is muri else "RESULTS", tmp_path)
    (tmp_path / "muri_trace1.csv").write_text(SIX_JOBS)
    for name, missing in (("muri-fig8", "cluster_trace"), ("muri-fig9", "no trace trace2, trace3, trace4")):
        done = CliRunner().invoke(main, [name])
        assert (done.exit_code, missing in done.stderr, name in done.stderr) == (1, True, True), done.stderr
    own = CliRunner().invoke(main, ["muri-table4", "--trace", str(tmp_path / "muri_trace1.csv"), "--json"])
    assert own.exit_code == 0
    assert {row["published"] for row in json.loads(own.stdout)["rows"]} == {None}
    assert [path.name for path in tmp_path.iterdir()] == ["muri_trace1.csv"]


@pytest.mark.parametrize("name", ["horus-fig2", "horus-fits", "sjf-bsbf-table2", "synergy-fig10", "synergy-fig13"])
def test_an_experiment_that_lacks_a_table_says_so_and_keeps_nothing(name, tmp_path, monkeypatch):
    monkeypatch.setattr(frame, "RESULTS", tmp_path)
    monkeypatch.setattr(horus_slowdown, "GAVEL", tmp_path / "pairs.csv")
    monkeypatch.setattr(horus_slowdown, "of_simulated", lambda jobs: None)
    monkeypatch.setattr(sjf_bsbf_workload, "PAIRS", tmp_path / "pairs.csv")
    monkeypatch.setattr(synergy_traces, "PUBLISHED", tmp_path / "synergy.csv")
    done = CliRunner().invoke(main, [name])
    assert (done.exit_code, "is not at hand" in done.stderr, list(tmp_path.iterdir())) == (1, True, []), done.stderr


def test_the_figures_of_every_experiment_are_shown():
    for name in experiments():
        kept = kept_figures(name)
        assert kept["rows"] and all(row["ours"] is not None for row in kept["rows"])
        assert [row.result for _, row in ROWS].count(name) == 1, f"lab/papers/*.yaml: one row needs `result: {name}`"
        assert not kept["curves"] or (RESULTS / f"{name}.png").stat().st_size > 1000
