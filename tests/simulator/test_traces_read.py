"""Reading traces: both CSV schemas, what is refused and how."""

from pathlib import Path

import pytest

from muri.simulator.traces.read import read_trace

SHARED_TRACES = Path(__file__).parents[3] / "shared" / "traces"


@pytest.mark.parametrize(("name", "jobs"), [("muri_trace1", 1494), ("muri_trace3", 992)])
def test_the_papers_traces_are_read_whole(name: str, jobs: int) -> None:
    path = SHARED_TRACES / f"{name}.csv"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    trace = read_trace(path)
    assert len(trace.jobs) == jobs
    assert trace.skipped_rows == 0
    assert trace.jobs[0].submit_s == 0
    assert all(before.submit_s <= after.submit_s for before, after in zip(trace.jobs, trace.jobs[1:], strict=False))
