"""What the twin predicts stays near what ran live; benchmarks/fidelity.py compares all workloads."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.parametrize("name", ["calm", "fresh-four"])
def test_a_live_run_is_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import fidelity

    monkeypatch.setattr(fidelity, "TWINS", 4)
    (found,) = fidelity.compare_all(BENCHMARKS / "results" / "fidelity", [name])
    assert abs(found.error("average_jct_s")) < 0.06
    assert abs(found.error("makespan_s")) < 0.04
