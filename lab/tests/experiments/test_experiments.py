"""Experiments as files: their runs, errors about wrong keys, and the page with ours beside the published figures."""

import json
import re
from pathlib import Path

import pytest
from browser import visit
from sweep_builders import small_trace, trace_file

from muri.commands import run_command
from muri.simulator.metrics import summarize
from muri.simulator.run import run_one
from muri_lab.experiments.command import experiment as command
from muri_lab.experiments.experiment import (
    ExperimentError,
    experiment_names,
    find_traces,
    load_experiment,
    parse_experiment,
    runs_of_experiment,
)
from muri_lab.experiments.page import Findings, compare, compare_ranges, markdown_page
from muri_lab.experiments.workloads import BOTTLENECKS, with_bottlenecks

SMALL = """
figure: Figure 0
title: A small one
about: Words.
model: default
nodes: 2
gpus_per_node: 4
traces: [small]
submit_at_zero: [false, true]
metrics: [avg_jct_s, makespan_s]
published:
  - {variant: fifo, trace: small, avg_jct_s: 1000}
  - {variant: muri-s, trace: "small'", avg_jct_s: 2000, at_most: true}
variants:
  - {name: fifo, policy: fifo}
  - {name: muri-s, policy: muri-s, options: {max_group_size: 2}}
"""


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    trace_file(folder, "muri_small")
    return folder


def test_every_shipped_experiment_can_be_run() -> None:
    assert experiment_names() == (
        "fig8", "fig9", "fig10", "fig11", "fig12", "fig13", "fig14", "table4", "table5", "testbed",
    )  # fmt: skip
    for name in experiment_names():
        experiment = load_experiment(name)
        wanted = runs_of_experiment(experiment, [small_trace("trace1", jobs=4)])
        assert len(wanted) == len(experiment.variants) * len(experiment.submit_at_zero) * len(experiment.seeds)
        named = experiment.figure.lower().replace("figure ", "fig").replace("table ", "table")
        assert named == {"testbed": "section 6.1, testbed"}.get(name, name)


def test_cells_hold_ours_the_published_and_the_ratio() -> None:
    experiment = parse_experiment(SMALL, "small.yaml")
    summaries = summarize([run_one(run) for run in runs_of_experiment(experiment, [small_trace("small")])])
    cells = {(cell.trace, cell.variant, cell.metric): cell for cell in compare(experiment, summaries)}
    assert len(cells) == 2 * 2 * 2
    of_fifo = cells["small", "fifo", "avg_jct_s"]
    assert of_fifo.ours == summaries[0].policies[0].figures["avg_jct_s"]
    assert of_fifo.ratio == pytest.approx((of_fifo.ours or 0) / 1000)
    assert cells["small'", "fifo", "avg_jct_s"].published is None
    assert cells["small'", "fifo", "avg_jct_s"].ratio is None
    assert cells["small", "fifo", "makespan_s"].published is None
    bound = cells["small'", "muri-s", "avg_jct_s"]
    assert (bound.published, bound.at_most) == (2000, True)
    assert summaries[1].policies[0].outcomes[0].run.trace.jobs[-1].submit_s == 0


def test_published_figures_are_set_beside_those_of_their_own_trace_only() -> None:
    experiment = parse_experiment(SMALL + RATIOS, "small.yaml")
    for name in ("other", "small"):
        summaries = summarize([run_one(run) for run in runs_of_experiment(experiment, [small_trace(name, jobs=4)])])
        published = [cell.published for cell in compare(experiment, summaries) if cell.published is not None]
        assert (published, len(compare_ranges(experiment, summaries))) == (
            ([], 0) if name == "other" else ([1000, 2000], 1)
        )
    with pytest.raises(ExperimentError, match=r"published\[0\]\.trace: Field required"):
        parse_experiment(SMALL.replace(" trace: small,", ""), "small.yaml")


def test_figures_relative_to_a_variant() -> None:
    experiment = parse_experiment(SMALL + "relative_to: muri-s\n", "small.yaml")
    summaries = summarize([run_one(run) for run in runs_of_experiment(experiment, [small_trace("small")])])
    cells = {(cell.trace, cell.variant, cell.metric): cell.ours for cell in compare(experiment, summaries)}
    fifo, muri = (policy.figures["avg_jct_s"] for policy in summaries[0].policies)
    assert cells["small", "muri-s", "avg_jct_s"] == 1
    assert cells["small", "fifo", "avg_jct_s"] == pytest.approx(fifo / muri)


RATIOS = """
curves: true
ranges:
  - {metric: avg_jct_s, over: muri-s, low: 1.5, high: 3}
"""


def test_variants_over_one_another_and_ranges_over_all_traces() -> None:
    text = SMALL.replace("{name: fifo, policy: fifo}", "{name: fifo, policy: fifo, over: muri-s}") + RATIOS
    experiment = parse_experiment(text.replace("makespan_s]", "queue_length_mean, gpu_busy]"), "small.yaml")
    summaries = summarize([run_one(run) for run in runs_of_experiment(experiment, [small_trace("small")])])
    cells = {(cell.trace, cell.variant, cell.metric): cell for cell in compare(experiment, summaries)}
    fifo, muri = (policy.figures for policy in summaries[0].policies)
    assert cells["small", "fifo", "gpu_busy"].ours == pytest.approx(
        fifo["utilization"]["gpu"] / muri["utilization"]["gpu"]
    )
    assert cells["small", "muri-s", "queue_length_mean"].ours == muri["queue_length_mean"]
    (found,) = compare_ranges(experiment, summaries)
    both = [cells[trace, "fifo", "avg_jct_s"].ours for trace in ("small", "small'")]
    assert found.ours == (min(both), max(both))
    assert found.published == (1.5, 3)
    text = markdown_page(Findings.of(experiment, summaries))
    assert "| fifo ÷ muri-s | average JCT |" in text
    assert "| others ÷ muri-s | average JCT |" in text
    assert "| 1.50 to 3.00 |" in text


def test_command_writes_the_page(traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "own.yaml", tmp_path / "out"
    file.write_text(SMALL.replace("traces: [small]", "traces: [small, other]"))
    words = [str(file), "--traces", str(traces), "--out", str(out), "--jobs", "1"]
    assert run_command(command, words) == 0
    text = capsys.readouterr().out
    assert text.strip() == (out / "experiment.md").read_text().strip()
    assert "traces were not given: other" in text
    assert re.search(r"^\| fifo \| average JCT \| [\d,]+ s \([\d.]+ \w+\) \| 1,000 s \(16\.7 min\) \| \d\.\d{4} \|$",
                     text, re.MULTILINE), text  # fmt: skip
    assert re.search(r"^\| fifo \| makespan \| [\d,]+ s \([\d.]+ \w+\) \| none \| - \|$", text, re.MULTILINE), text
    assert "| ≤ 2,000 s" in text
    assert run_command(command, [*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["cells"]) == 8
    assert "ranges" not in document
    assert set(document["traces"]) == {"small", "small'"}
    seen = visit(out / "experiment.html", tmp_path)
    assert seen.console == ()
    assert seen.requests == ()
    assert seen.dom.count("<table>") == 2
    assert "≤ 2,000 s" in seen.dom


def test_command_draws_what_happens_over_time(traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "own.yaml", tmp_path / "out"
    file.write_text(SMALL + RATIOS)
    words = [str(file), "--traces", str(traces), "--out", str(out), "--jobs", "1", "--json"]
    assert run_command(command, words) == 0
    assert json.loads(capsys.readouterr().out)["ranges"][0]["published"] == [1.5, 3]
    drawn = sorted(path.name for path in (out / "small").glob("*.png"))
    assert drawn == ["blocking-index.png", "queue-length.png", "utilization.png"]


def test_no_traces_says_which_are_looked_for(tmp_path: Path) -> None:
    experiment = load_experiment("fig9")
    with pytest.raises(ExperimentError, match=r"needs --traces DIR with trace1\.csv or muri_trace1\.csv"):
        find_traces(experiment, None, [])
    with pytest.raises(ExperimentError, match=r"none of trace1\.csv"):
        find_traces(experiment, tmp_path, [])
    with pytest.raises(ExperimentError, match="No such file"):
        find_traces(experiment, tmp_path / "nowhere", [])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("policy: fifo", "polcy: fifo"), "variants[0].polcy: Extra inputs"),
        (("model: default", "model: paper"), "model: Input should be 'default' or 'reference'"),
        (("nodes: 2", "nodes: many"), "nodes: Input should be a valid integer"),
        (("policy: fifo}", "policy: fifo, over: lifo}"), "lifo is not a variant"),
        (("variant: fifo", "variant: lifo"), "lifo is not a variant; variants are: fifo, muri-s"),
        (("name: muri-s", "name: fifo"), "fifo is there more than once"),
        (("metrics: [avg_jct_s", "metrics: [avg_jct"), "metrics[0]: Input should be 'avg_jct_s'"),
        (("figure:", "figure"), "not YAML"),
    ],
)
def test_wrong_keys_are_named(change: tuple[str, str], said: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        parse_experiment(SMALL.replace(*change), "small.yaml")
    assert said in str(caught.value)
    assert str(caught.value).startswith("small.yaml: ")


def test_unknown_policy_of_a_variant_is_named() -> None:
    experiment = parse_experiment(SMALL.replace("policy: fifo", "policy: lifo"), "small.yaml")
    with pytest.raises(ExperimentError, match=r"Figure 0: variant fifo: unknown policy 'lifo'.*valid are"):
        runs_of_experiment(experiment, [small_trace()])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fig7",), "unknown experiment 'fig7'; valid are: fig8, fig9"),
        (("nowhere.yaml",), "nowhere.yaml: No such file"),
        (("fig9", "--nodes", "4"), "No such option"),
        (("fig9",), "needs --traces DIR"),
    ],
)
def test_wrong_command_lines(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(command, list(words)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("kinds", [1, 2, 3, 4])
def test_jobs_train_models_of_so_many_bottlenecks_for_as_long_as_before(kinds: int) -> None:
    trace = small_trace()
    changed = with_bottlenecks(trace, kinds)
    wanted = {name for models in list(BOTTLENECKS.values())[:kinds] for name in models}
    assert {job.key.model for job in changed.jobs} == wanted
    for before, after in zip(trace.jobs, changed.jobs, strict=True):
        assert after.service_s == pytest.approx(before.service_s, abs=after.profile.iteration_s)
    assert with_bottlenecks(trace, kinds) == changed
    assert with_bottlenecks(trace, kinds, seed=1) != changed
    assert with_bottlenecks(changed, 4) == changed
