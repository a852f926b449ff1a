"""What the twin predicts stays near what ran live; lab/muri_lab/benchmarks/forty.py compares all runs."""

from pathlib import Path

import pytest

from muri_lab.benchmarks import fidelity, forty


@pytest.mark.parametrize("side", ["plain", pytest.param("muri", marks=pytest.mark.thorough)])
def test_live_runs_of_forty_jobs_are_predicted(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "TWINS", 3)
    found, _ = forty.compared(side, Path(fidelity.__file__).with_name("results") / "fidelity")
    assert abs(found.error("average_jct_s")) < 0.06
    assert abs(found.error("makespan_s")) < 0.04
