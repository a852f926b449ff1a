"""Traces keep to the trace-event format, can be read back, and have bounds."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launcher_harness import Launcher, ends
from polling import until
from trace_rules import names_of_threads, require_valid

from examples.demo.timeline import Slice, load_events, read_slices
from muri.errors import UsageError
from muri.launcher.script import trace as trace_module
from muri.launcher.script.trace import Trace
from muri.profiler.records import STAGES

LOOP = """
    import os, sys, time, muri
    open("of-" + os.environ["SLURM_JOB_ID"], "w").close()
    while not all(os.path.exists("of-" + partner) for partner in sys.argv[2:]):
        time.sleep(0.005)
    for _ in muri.batches(range(int(sys.argv[1]))):
        with muri.stage("propagate"):
            time.sleep(0.004)
            with muri.stage("propagate"):
                time.sleep(0.004)
        with muri.stage("synchronize"):
            time.sleep(0.002)
"""


def test_group_writes_a_valid_trace_with_waits_holders_and_iterations(launcher: Launcher) -> None:
    """One member is a thread, the other one a process of its own."""
    path = launcher.folder / "out.json"
    runtime = launcher.threads("101", "102", options=("--trace", str(path), "--discipline", "fair"))
    script, before_s = launcher.script(LOOP), time.time()
    isolations = {"101": "thread", "102": "process"}
    members = [launcher.member(job, script, 100, *isolations, MURI_ISOLATION=how) for job, how in isolations.items()]
    assert [ends(member) for member in members] == [0, 0]
    runtime.terminate()
    assert ends(runtime) == 0
    events = json.loads(path.read_text())
    require_valid(events)
    tracks = names_of_threads(events)
    assert {"job 101", "job 102", *(f"{resource}: held by" for resource in ("storage", "gpu", "network"))} == set(
        tracks
    )
    assert sum(e["ph"] == "i" for e in events) == 200
    assert {e["name"] for e in events if e["ph"] == "i"} == {f"iteration {i}" for i in range(1, 101)}
    assert "wait for gpu" in {e["name"] for e in events}
    assert all(before_s <= e["ts"] / 1e6 <= time.time() for e in events if "ts" in e)
    slices = read_slices(path)
    for member in ("101", "102"):
        held_s = sum(p.end_s - p.start_s for p in slices if (p.member, p.what) == (member, "propagate"))
        assert 0.8 <= held_s <= time.time() - before_s


def test_trace_of_a_killed_runtime_can_be_read(launcher: Launcher) -> None:
    path = launcher.folder / "out.json"
    runtime = launcher.threads("101", options=("--trace", str(path)))
    member = launcher.member("101", launcher.script(LOOP), 100_000)
    until(lambda: "iteration 20" in path.read_text(), "20 iterations in the trace")
    member.kill()
    runtime.kill()
    assert ends(runtime) < 0
    text = path.read_text()
    with pytest.raises(ValueError, match=r"delimiter|value"):
        json.loads(text)
    require_valid(load_events(text))
    assert load_events(text) == load_events(text + ',\n{"name":"pro')
    assert {piece.member for piece in read_slices(path)} == {"101"}


stretches = st.lists(
    st.tuples(
        st.sampled_from(["7", "12"]), st.sampled_from(STAGES), st.floats(0, 50), st.floats(0, 2), st.floats(0, 1)
    ),
    min_size=1,
    max_size=30,
)


@given(stretches)
def test_any_stretches_of_several_threads_give_a_valid_trace(tmp_path_factory: Any, events: list[Any]) -> None:
    path = tmp_path_factory.mktemp("trace") / "out.json"
    trace = Trace(path, "group", shared=False)
    for member, stage, start_s, length_s, wait_s in events:
        trace.record(member, stage, 100 + start_s, 100 + start_s + length_s, wait_s)
    trace.close()
    require_valid(json.loads(path.read_text()))
    read = read_slices(path)
    assert sum(piece.what != "wait" for piece in read) == len(events)


def test_what_is_kept_between_two_flushes_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_module, "MOST_PENDING", 1000)
    trace = Trace(tmp_path / "out.json", "group")
    for _ in range(2500):
        trace.record("7", "load", 1.0, 2.0, 0.0)
    assert trace.dropped == 1500
    trace.close()
    assert "out.json lacks 1500 events" in caplog.text
    trace.record("7", "load", 1.0, 2.0, 0.0)
    trace.flush()


def test_trace_that_grows_too_large_is_closed_properly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_module, "LARGEST_TRACE_BYTES", 2000)
    trace = Trace(tmp_path / "out.json", "group")
    for _ in range(50):
        trace.record("7", "load", time.perf_counter(), time.perf_counter(), 0.0)
        trace.flush()
    size = (tmp_path / "out.json").stat().st_size
    assert 2000 < size < 4000
    require_valid(json.loads((tmp_path / "out.json").read_text()))
    assert trace.dropped > 0
    trace.close()
    assert caplog.text.count("out.json ends here") == 1


def test_trace_that_cannot_be_written_is_said_clearly(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write the trace .*No such file or directory"):
        Trace(tmp_path / "no" / "out.json", "group")


def test_a_trace_can_be_read_back(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "out.json", "group")
    for index, stage in enumerate(STAGES):
        trace.record("7", stage, index, index + 0.75, 0.25 if index else 0.0)
        trace.record("12", stage, index + 0.75, index + 1.0, 0.0)
    trace.close()
    slices = read_slices(trace.path)
    assert [piece.what for piece in slices if piece.member == "7"] == [
        "load", "wait", "preprocess", "wait", "propagate", "wait", "synchronize",
    ]  # fmt: skip
    first = slices[0]
    assert first.end_s - first.start_s == pytest.approx(0.75, abs=1e-5)
    assert isinstance(first, Slice)
