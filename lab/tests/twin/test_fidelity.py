"""What the twin predicts stays near what ran live; benchmarks/forty.py compares all runs."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.parametrize("side", ["plain", pytest.param("muri", marks=pytest.mark.thorough)])
def test_live_runs_of_forty_jobs_are_predicted(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import fidelity
    import forty

    monkeypatch.setattr(fidelity, "TWINS", 3)
    found, _ = forty.compared(side, BENCHMARKS / "results" / "fidelity")
    assert abs(found.error("average_jct_s")) < 0.06
    assert abs(found.error("makespan_s")) < 0.04
