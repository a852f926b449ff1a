"""The folder of --out: files for programs, plots, and a page that a real browser opens offline."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
from browser import screenshot, visit
from hypothesis import given
from hypothesis import strategies as st
from sweep_builders import CLUSTER, runs, small_trace, summary

from muri.simulator.metrics import TraceSummary, summarize
from muri.simulator.model import Cluster, GroupSpan, SimulationResult
from muri.simulator.run import sweep
from muri_lab.report import series
from muri_lab.report.html import page
from muri_lab.report.images import safe_name
from muri_lab.report.write import ReportError, write_report


@pytest.fixture(scope="module")
def one_trace() -> TraceSummary:
    return summary()


@pytest.fixture(scope="module")
def report(one_trace: TraceSummary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_report([one_trace], folder)
    return folder


def first_result(one_trace: TraceSummary, policy: int = 0) -> SimulationResult:
    return one_trace.policies[policy].outcomes[0].result


def test_files_agree_with_each_other(report: Path, one_trace: TraceSummary) -> None:
    results = json.loads((report / "results.json").read_text())
    assert results == json.loads(json.dumps(one_trace.as_json()))
    with (report / "jobs.csv").open() as stream:
        jobs = list(csv.DictReader(stream))
    with (report / "metrics.csv").open() as stream:
        metrics = {row["policy"]: row for row in csv.DictReader(stream)}
    for policy in ("fifo", "muri-s"):
        times = [float(row["jct_s"]) for row in jobs if row["policy"] == policy]
        assert len(times) == 40
        average = results["policies"][policy]["avg_jct_s"]
        assert sum(times) / len(times) == pytest.approx(average)
        assert float(metrics[policy]["avg_jct_s"]) == average
        assert float(metrics[policy]["utilization.gpu"]) == results["policies"][policy]["utilization"]["gpu"]


def test_images_have_something_on_them(report: Path) -> None:
    names = {path.name for path in report.glob("*.png")}
    assert names == {"queue-length.png", "blocking-index.png", "utilization.png"}
    for name in names:
        pixels = matplotlib.image.imread(report / name)
        assert pixels.shape[0] > 500
        assert pixels[..., :3].std() > 0.02, name


def test_browser_draws_tables_and_plots_without_errors_or_network(report: Path, tmp_path: Path) -> None:
    seen = visit(report / "report.html", tmp_path)
    assert 'data-drawn="yes"' in seen.dom
    assert seen.console == ()
    assert seen.requests == ()
    rows = re.findall(r'<tr><th scope="row">([\w-]+)</th>', seen.dom)
    assert rows == ["fifo", "muri-s"]
    for plot in ("jct", "queue", "utilization", "speedup", "timeline-0", "timeline-1"):
        drawn = seen.dom.partition(f'id="plot-0-{plot}"')[2].partition("</section>")[0]
        assert 'class="main-svg"' in drawn, plot
    # The curves themselves: two policies in each of the plots of lines.
    for plot, curves in (("jct", 2), ("queue", 2), ("utilization", 8)):
        drawn = seen.dom.partition(f'id="plot-0-{plot}"')[2].partition("</section>")[0]
        assert len(re.findall(r'<path class="js-line"[^>]* d="M(?!5,0h)', drawn)) == curves, plot
    bars = seen.dom.partition('id="plot-0-timeline-1"')[2].partition("</section>")[0]
    assert bars.count('<g class="point">') >= 10
    assert "2 jobs" in bars


@pytest.mark.parametrize(
    ("flags", "darkest", "lightest"),
    [(("--blink-settings=preferredColorScheme=0",), 0.0, 0.3), pytest.param((), 0.8, 1.0, marks=pytest.mark.thorough)],
)
def test_browser_shows_it_in_dark_and_light(
    report: Path, tmp_path: Path, flags: tuple[str, ...], darkest: float, lightest: float
) -> None:
    screenshot(report / "report.html", tmp_path / "page.png", "--window-size=1000,900", *flags)
    pixels = matplotlib.image.imread(tmp_path / "page.png")[..., :3]
    assert darkest < pixels.mean() < lightest
    assert pixels.std() > 0.03


def test_what_the_browser_test_relies_on_sees_requests_and_errors(tmp_path: Path) -> None:
    wild = tmp_path / "wild.html"
    wild.write_text('<img src="http://127.0.0.1:9/dot.png"><script>throw new Error("broken")</script>')
    seen = visit(wild, tmp_path / "one")
    assert seen.requests == ("http://127.0.0.1:9/dot.png",)
    assert any("broken" in message for message in seen.console)
    tamed = tmp_path / "tamed.html"
    tamed.write_text(page("x", '<img src="http://127.0.0.1:9/dot.png">'))
    seen = visit(tamed, tmp_path / "two")
    assert seen.requests == ()
    assert any("Content Security Policy" in message for message in seen.console)


def test_several_traces_and_seeds_on_one_page(tmp_path: Path) -> None:
    wanted = runs(("muri-l",), [small_trace("a/b", jobs=12), small_trace("<b>", jobs=5)], profile_noise=0.3)
    wanted += [replace(run, settings=replace(run.settings, seed=1)) for run in wanted]
    write_report(summarize(sweep(wanted)), tmp_path)
    assert (tmp_path / "a-b" / "queue-length.png").exists()
    seen = visit(tmp_path / "report.html", tmp_path / "browser-files")
    assert seen.console == ()
    assert "mean of 2 seeds" in seen.dom
    assert "<b>" not in seen.dom
    assert "&lt;b&gt;" in seen.dom
    with (tmp_path / "jobs.csv").open() as stream:
        assert {row["seed"] for row in csv.DictReader(stream)} == {"0", "1"}


def test_folder_that_cannot_be_written(one_trace: TraceSummary, tmp_path: Path) -> None:
    (tmp_path / "results.json").mkdir()
    with pytest.raises(ReportError, match=r"results\.json"):
        write_report([one_trace], tmp_path)


def test_cdf_ends_with_everybody(one_trace: TraceSummary) -> None:
    curve = series.jct_cdf(first_result(one_trace))
    assert curve.y[-1] == 1.0
    assert list(curve.x) == sorted(record.jct_s for record in first_result(one_trace).records)


def test_queue_keeps_its_mean_however_much_it_is_thinned(
    one_trace: TraceSummary, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = first_result(one_trace)

    def mean() -> float:
        curve = series.queue_length(result)
        area = sum(level * (after - now) for now, after, level in zip(curve.x, curve.x[1:], curve.y, strict=False))
        return area / (curve.x[-1] - curve.x[0])

    whole = mean()
    monkeypatch.setattr(series, "MAX_POINTS", 7)
    assert len(series.queue_length(result).x) <= 8
    assert mean() == pytest.approx(whole)
    assert whole > 0


def test_speedup_of_each_job_and_of_all(one_trace: TraceSummary) -> None:
    fifo, muri = (policy.figures["avg_jct_s"] for policy in one_trace.policies)
    assert one_trace.speedup(one_trace.policies[1]) == fifo / muri > 1
    base, other = first_result(one_trace), first_result(one_trace, 1)
    points = {point.job_id: point for point in series.job_speedups(base, other)}
    for one, two in zip(base.records, other.records, strict=True):
        assert points[one.job.job_id].speedup == one.jct_s / two.jct_s


@given(st.integers(1, 500), st.integers(2, 60))
def test_thinned_keeps_the_ends_and_repeats_nothing(count: int, most: int) -> None:
    chosen = list(series.thinned(count, most))
    assert (chosen[0], chosen[-1]) == (0, count - 1)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(count, most)


def test_bars_of_a_timeline_lie_beside_each_other(one_trace: TraceSummary) -> None:
    bars, left_out = series.timeline(first_result(one_trace, 1))
    assert left_out == 0
    assert {bar.span for bar in bars} == set(first_result(one_trace, 1).spans)
    for index, one in enumerate(bars):
        assert one.span.node == one.lane // CLUSTER.gpus_per_node
        for other in bars[index + 1 :]:
            same_time = one.span.start_s < other.span.end_s and other.span.start_s < one.span.end_s
            same_gpu = one.lane < other.lane + other.height and other.lane < one.lane + one.height
            assert not (same_time and same_gpu), (one, other)


def test_group_on_several_nodes_is_one_high_bar(one_trace: TraceSummary) -> None:
    spans = (GroupSpan(0.0, 5.0, (1,), 0, 8), GroupSpan(5.0, 6.0, (2,), 1, 4))
    bars, _ = series.timeline(replace(first_result(one_trace), spans=spans, cluster=Cluster(2, 4)))
    assert [(bar.lane, bar.height) for bar in bars] == [(0, 8), (4, 4)]
    assert all(0 < bar.height - bar.drawn_height < 0.1 for bar in bars)  # a wider gap would look like idle GPUs


def test_largest_stays_are_drawn_and_the_rest_counted(one_trace: TraceSummary, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = tuple(GroupSpan(float(start), start + 1.0 + start % 3, (start,), 0, 1) for start in range(9))
    monkeypatch.setattr(series, "MAX_SPANS", 3)
    bars, left_out = series.timeline(replace(first_result(one_trace), spans=spans))
    assert [bar.span.start_s for bar in bars] == [2.0, 5.0, 8.0]
    assert left_out == 6


def test_stay_on_scattered_gpus_is_several_bars(one_trace: TraceSummary) -> None:
    spans = (
        *(GroupSpan(0.0, 9.0 if gpu == 1 else 1.0, (gpu,), 0, 1) for gpu in range(4)),
        GroupSpan(1.0, 2.0, (5,), 0, 3),
    )
    bars, _ = series.timeline(replace(first_result(one_trace), spans=spans))
    assert [(bar.lane, bar.height) for bar in bars if bar.span.members == (5,)] == [(0, 1), (2, 2)]


@pytest.mark.parametrize(("name", "safe"), [("a/b c.csv", "a-b-c.csv"), ("../x", "x"), ("///", "trace")])
def test_names_of_folders(name: str, safe: str) -> None:
    assert safe_name(name) == safe
