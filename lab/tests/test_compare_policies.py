"""The page that compares policies: every run shows, with its figures or with the reason why there are none."""

import pytest

from muri_lab.benchmarks import compare_policies as comparison
from muri_lab.benchmarks import compare_policies_page as page

FIGURES = {"avg_jct_h": 4.0, "p99_jct_h": 40.4, "makespan_h": 99.6, "restarts_per_job": 0.25, "wall_s": 1.0}
STORED = {
    "small": {"figures": {"fifo": FIGURES, "srtf": FIGURES | {"avg_jct_h": 2.0}, "tiresias": {"failed": "too slow"}}},
    "large": {
        "figures": {"fifo": {"failed": "too slow"}, "srtf": FIGURES, "tiresias": {"failed": "job 7 is too large"}}
    },
}


def test_every_run_shows() -> None:
    lines = page.tables(STORED, ["small", "large"]).splitlines()
    assert "| `fifo` | 4.00 h (1.00 ×) | – [1] |" in lines
    assert "| `srtf` | 2.00 h (2.00 ×) | 4.00 h |" in lines
    assert "| `tiresias` | – [1] | – [2] |" in lines
    assert "| `srtf` | 40 h, 100 h, 0.2 | 40 h, 100 h, 0.2 |" in lines
    assert lines[-2:] == ["1. too slow", "2. job 7 is too large"]


def test_a_run_that_is_refused_or_takes_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(comparison.NODES, "short-and-crowded", 0)
    assert "0" in comparison.attempt("short-and-crowded", "fifo", 40)["failed"]
    monkeypatch.undo()
    monkeypatch.setattr(comparison, "run_one", _without_end)
    assert comparison.attempt("storage-heavy", "fifo", 0.01) == {"failed": "takes more than 0.01 s of computing"}


def _without_end(_: object) -> None:
    while True:
        pass


def test_every_shipped_trace_is_compared() -> None:
    assert set(comparison.NODES) == {path.stem for path in comparison.TRACES.glob("*.csv")}
