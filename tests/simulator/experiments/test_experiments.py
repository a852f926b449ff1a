"""Experiments as files: what they run, what they say of wrong keys, and the page with ours beside the published."""

import json
import re
from pathlib import Path

import pytest
from browser import visit
from sweep_builders import small_trace, trace_file

from muri.commands import run_command
from muri.simulator.cli.simulate_command import simulate
from muri.simulator.experiments.experiment import (
    ExperimentError,
    experiment_names,
    find_traces,
    load_experiment,
    parse_experiment,
    published_runs,
    runs_of_experiment,
)
from muri.simulator.experiments.page import Findings, compare, compare_ranges, html_page, markdown_page
from muri.simulator.experiments.workloads import BOTTLENECKS, submitted_at_zero, with_bottlenecks
from muri.simulator.model import Trace
from muri.simulator.sweep.runs import run_one
from muri.simulator.sweep.summary import summarise
from muri.simulator.traces.models import measured_models

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
  - {variant: muri-s, avg_jct_s: 2000, at_most: true}
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


def test_what_the_experiments_vary() -> None:
    def variants(name: str) -> list[tuple[object, ...]]:
        return [
            (one.policy, one.options.get("max_group_size"), one.profile_noise, one.bottleneck_types)
            for one in load_experiment(name).variants
        ]

    assert ("muri-l", 2, 0.0, None) in variants("fig12")
    assert ("muri-l", 3, 0.0, None) in variants("fig12")
    assert {policy for policy, *_ in variants("fig11")} == {"muri-l", "muri-l-worst-ordering", "muri-l-no-blossom"}
    assert {kinds for *_, kinds in variants("fig13")} == {1, 2, 3, 4}
    assert [noise for *_, noise, _ in variants("fig14")] == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert load_experiment("fig9").submit_at_zero == (False, True)
    assert load_experiment("fig12").submit_at_zero == (True,)


def test_published_figures_of_the_public_simulator() -> None:
    runs = published_runs()
    assert {trace for trace, _ in runs} == {f"trace{number}{prime}" for number in range(1, 5) for prime in ("", "'")}
    assert runs["trace1", "muri-s"].avg_jct_s == 867705.794
    assert runs["trace3", "muri-l-no-blossom"].figure("p99_jct_s") == 936843.993
    assert runs["trace2", "muri-l-no-blossom"].figure("p99_jct_s") is None
    assert runs["trace3", "srsf"].figure("median_jct_s") is None


@pytest.mark.parametrize(
    ("name", "base", "others"),
    [("fig9", "muri-s", ("srtf", "srsf")), ("fig10", "muri-l", ("tiresias", "antman", "themis"))],
)
def test_the_ranges_of_the_text_are_those_of_the_published_figures(
    name: str, base: str, others: tuple[str, ...]
) -> None:
    runs = published_runs()
    traces = {trace for trace, _ in runs}
    for wanted in load_experiment(name).ranges:
        pairs = [(runs[trace, other], runs[trace, base]) for trace in traces for other in others]
        ratios = [(one.figure(wanted.metric) or 0) / (own.figure(wanted.metric) or 1) for one, own in pairs]
        assert (min(ratios), max(ratios)) == pytest.approx((wanted.low, wanted.high), abs=0.006)


def test_published_speed_ups_of_figure_13_are_those_of_the_text() -> None:
    published = {one.variant: one.avg_jct_s for one in load_experiment("fig13").published}
    said = {"srtf, 2 kinds": 1.42, "srtf, 4 kinds": 2.26, "tiresias, 2 kinds": 1.49, "tiresias, 4 kinds": 3.92}
    assert {name: published[name] for name in said} == pytest.approx(said, abs=0.006)


def test_cells_hold_ours_the_published_and_the_ratio() -> None:
    experiment = parse_experiment(SMALL, "small.yaml")
    summaries = summarise([run_one(run) for run in runs_of_experiment(experiment, [small_trace("small")])])
    cells = {(cell.trace, cell.variant, cell.metric): cell for cell in compare(experiment, summaries)}
    assert len(cells) == 2 * 2 * 2
    of_fifo = cells["small", "fifo", "avg_jct_s"]
    assert of_fifo.ours == summaries[0].policies[0].figures["avg_jct_s"]
    assert of_fifo.ratio == pytest.approx((of_fifo.ours or 0) / 1000)
    assert cells["small'", "fifo", "avg_jct_s"].published is None
    assert cells["small'", "fifo", "avg_jct_s"].ratio is None
    assert cells["small", "fifo", "makespan_s"].published is None
    anywhere = cells["small'", "muri-s", "avg_jct_s"]
    assert (anywhere.published, anywhere.at_most) == (2000, True)
    assert summaries[1].policies[0].outcomes[0].run.trace.jobs[-1].submit_s == 0


def test_figures_relative_to_a_variant() -> None:
    experiment = parse_experiment(SMALL + "relative_to: muri-s\n", "small.yaml")
    summaries = summarise([run_one(run) for run in runs_of_experiment(experiment, [small_trace("small")])])
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
    summaries = summarise([run_one(run) for run in runs_of_experiment(experiment, [small_trace("small")])])
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


def test_a_variant_with_a_model_of_its_own() -> None:
    text = SMALL.replace("max_group_size: 2}}", "max_group_size: 2}, model: reference}") + "interval_s: 60\n"
    fifo, muri = runs_of_experiment(parse_experiment(text, "small.yaml"), [small_trace("small")])[:2]
    assert (fifo.settings.model, fifo.settings.interval_s) == ("default", 60)
    assert (muri.settings.model, muri.settings.interval_s) == ("reference", 0)


def test_command_writes_the_page(traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "own.yaml", tmp_path / "out"
    file.write_text(SMALL.replace("traces: [small]", "traces: [small, other]"))
    words = ["--experiment", str(file), "--traces", str(traces), "--out", str(out)]
    assert run_command(simulate, words) == 0
    text = capsys.readouterr().out
    assert text.strip() == (out / "experiment.md").read_text().strip()
    assert "traces were not given: other" in text
    assert re.search(r"^\| fifo \| average JCT \| [\d,]+ s \([\d.]+ \w+\) \| 1,000 s \(16\.7 min\) \| \d\.\d{4} \|$",
                     text, re.MULTILINE), text  # fmt: skip
    assert re.search(r"^\| fifo \| makespan \| [\d,]+ s \([\d.]+ \w+\) \| none \| - \|$", text, re.MULTILINE), text
    assert "| ≤ 2,000 s" in text
    assert run_command(simulate, [*words, "--json"]) == 0
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
    words = ["--experiment", str(file), "--traces", str(traces), "--out", str(out), "--json"]
    assert run_command(simulate, words) == 0
    assert json.loads(capsys.readouterr().out)["ranges"][0]["published"] == [1.5, 3]
    drawn = sorted(path.name for path in (out / "small").glob("*.png"))
    assert drawn == ["blocking-index.png", "queue-length.png", "utilization.png"]


def test_traces_by_path_instead_of_a_folder(tmp_path: Path) -> None:
    experiment = parse_experiment(SMALL, "small.yaml")
    path = trace_file(tmp_path, "muri_trace1")
    assert find_traces(experiment, None, [path]).files == {"trace1": path}


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
        (("policy: fifo}", "policy: fifo, over: lifo}"), "lifo is no variant"),
        (("variant: fifo", "variant: lifo"), "lifo is no variant; variants are: fifo, muri-s"),
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
        (("--experiment", "fig7"), "unknown experiment 'fig7'; valid are: fig8, fig9"),
        (("--experiment", "nowhere.yaml"), "nowhere.yaml: No such file"),
        (("--experiment", "fig9", "--policy", "fifo"), "--experiment names its own"),
        (("--experiment", "fig9", "--nodes", "4"), "--nodes"),
        (("--experiment", "fig9"), "needs --traces DIR"),
    ],
)
def test_wrong_command_lines(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(simulate, list(words)) == 2
    assert said in capsys.readouterr().err


def test_submitted_at_zero_keeps_the_jobs() -> None:
    trace = small_trace()
    primed = submitted_at_zero(trace)
    assert primed.name == "small'"
    assert {job.submit_s for job in primed.jobs} == {0.0}
    assert [job.service_s for job in primed.jobs] == [job.service_s for job in trace.jobs]


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


def test_models_of_a_bottleneck_have_it() -> None:
    """On the GPU counts on which the paper measured Table 1; VGG's network takes the longest only between nodes."""
    for resource, models in BOTTLENECKS.items():
        profiles = {model.name: model.profile(16) for model in measured_models() if model.name in models}
        assert {profile.bottleneck for profile in profiles.values()} == {resource}


def test_page_without_cells_is_still_a_page() -> None:
    experiment = parse_experiment(SMALL, "small.yaml")
    assert compare(experiment, summarise([])) == ()
    nothing = Findings.of(experiment, (), ("small",))
    assert markdown_page(nothing).startswith("# Figure 0: A small one\n")
    assert "<h1>Figure 0: A small one</h1>" in html_page(nothing)


def test_empty_trace_has_no_runs_to_compare() -> None:
    experiment = parse_experiment(SMALL, "small.yaml")
    assert runs_of_experiment(experiment, ()) == ()
    assert submitted_at_zero(Trace("none", ())).jobs == ()
