"""The dashboard, the alert rules and the page name metrics that Muri exports, with labels and values that it uses."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from fake_slurm import FakeSlurm, four_jobs, one_cycle, one_gpu

from muri.slurm_plugin.controller.metrics import METRICS

ROOT = Path(__file__).resolve().parents[3]
ALERTS = ROOT / "etc/prometheus/muri-alerts.yaml"
LABELS = {metric.exported: set(metric.labels) for metric in METRICS}
SELECTOR = re.compile(r"(muri_\w+)(?:\{([^}]*)\})?")
GROUPING = re.compile(r"by \(([^)]*)\)")
ADDED_BY_PROMETHEUS = {"instance", "job"}


def dashboard() -> dict[str, object]:
    return json.loads((ROOT / "etc/grafana/muri.json").read_text())


def dashboard_queries() -> list[str]:
    board = dashboard()
    variables = [each["query"]["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    return variables + [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def alert_queries() -> list[str]:
    return [rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def unknown_names(query: str) -> set[str]:
    """Return names in a query that Muri does not export."""
    used = SELECTOR.findall(query)
    wrong = {name for name, _ in used} - LABELS.keys()
    allowed = set().union(ADDED_BY_PROMETHEUS, *(LABELS.get(name, set()) for name, _ in used))
    wrong |= {label for _, text in used for label in re.findall(r"(\w+)(?==~|=|!=|!~)", text)} - allowed
    wrong |= {label.strip() for text in GROUPING.findall(query) for label in text.split(",")} - allowed
    return wrong


@pytest.mark.parametrize("query", [*dashboard_queries(), *alert_queries()])
def test_queries_name_what_muri_exports(query):
    assert SELECTOR.search(query)
    assert unknown_names(query) == set()


def test_every_metric_is_on_the_dashboard_or_in_an_alert():
    used = {name for query in [*dashboard_queries(), *alert_queries()] for name, _ in SELECTOR.findall(query)}
    assert LABELS.keys() - used <= {"muri_info", "muri_members_ended_total"}


def test_the_page_has_a_row_for_each_metric_and_each_alert():
    page = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(muri_\w+)` \| (\w+) \|([^|]*)\|", page, re.MULTILINE)
    told = [(name, kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows]
    assert told == [(metric.exported, metric.kind, list(metric.labels)) for metric in METRICS]
    rules = [rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert re.findall(r"^\| (Muri\w+) \|", page, re.MULTILINE) == rules


@pytest.fixture(scope="module")
def promtool() -> str:
    cache = Path(os.environ.get("MURI_CACHE") or Path.home() / ".cache/muri")
    found = shutil.which("promtool") or shutil.which("promtool", path=cache / "promtool")
    if found is None:
        pytest.fail("there is no promtool; run scripts/install-promtool")
    return found


def run(promtool: str, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([promtool, *arguments], input=text, capture_output=True, text=True, check=False)


def test_promtool_accepts_the_rules_and_they_fire_when_they_should(promtool):
    tests = Path(__file__).with_name("muri-alerts-test.yaml")
    for done in (run(promtool, "check", "rules", str(ALERTS)), run(promtool, "test", "rules", str(tests))):
        assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_nothing_wrong_with_the_metrics(promtool, make_controller, accounts, tmp_path):
    slurm = FakeSlurm(four_jobs(), one_gpu(), gate_license=True)
    path = tmp_path / "muri.prom"
    for _ in range(3):
        slurm.tick()
        one_cycle(make_controller, slurm, metrics_file=str(path))
    done = run(promtool, "check", "metrics", text=path.read_text())
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
