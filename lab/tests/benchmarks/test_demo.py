"""What the demo leaves behind, and what the README says of it."""

import sys
from pathlib import Path

import pytest
from rich.console import Console

from examples.demo import timeline
from examples.demo.cluster import MURI_JCT, SHIPPED, JobRecord
from examples.demo.report import draw_timeline, print_table, save
from examples.demo.timeline import Slice, TraceFileError, read_slices
from muri.errors import UsageError
from muri.launcher.script.trace import Trace
from muri.slurm_plugin.config import Config, load_config
from muri_lab.benchmarks import demo


def jobs(*ends_s: float) -> tuple[JobRecord, ...]:
    """Jobs of which each is submitted at 100 s, and ends so much later."""
    return tuple(JobRecord(n, f"job-{n}", "COMPLETED", 100.0, 101.0, 100.0 + s, 0) for n, s in enumerate(ends_s, 1))


ROUNDS = {"slurm": jobs(30, 60), "shipped": jobs(40, 40), "muri-jct": jobs(20, 40)}


def test_the_demo_changes_nothing_of_what_is_shipped_that_decides_and_the_last_round_one_key(tmp_path: Path) -> None:
    path = tmp_path / "muri.yaml"
    shipped, differing = Config(), []
    for text in (SHIPPED, MURI_JCT):
        path.write_text(text)
        config = load_config(path)
        differing.append({name for name in Config.model_fields if getattr(config, name) != getattr(shipped, name)})
    assert differing == [{"pilot"}, {"pilot", "policy"}]
    assert config.pilot == shipped.pilot.model_copy(update={"trace": True})
    assert config.policy == "muri-jct"


def test_the_table_has_what_each_round_is_to_plain_slurm(tmp_path: Path) -> None:
    console = Console(width=120, file=(tmp_path / "table").open("w"))
    print_table(ROUNDS, console)
    console.file.close()
    rows = [" ".join(line.strip("│ ").split()) for line in (tmp_path / "table").read_text().splitlines()]
    assert "average JCT │ 45.0 │ 40.0 │ 30.0 │ 1.12 × │ 1.50 ×" in rows
    assert "makespan │ 60.0 │ 40.0 │ 40.0 │ 1.50 × │ 1.50 ×" in rows


@pytest.mark.parametrize(("stays", "count"), [({"7": [(0, 9)], "8": [(5, 9), (5, 9)]}, 2), ({"7": [(0, 9)]}, 1)])
def test_the_picture_shows_the_group_with_most_members_at_once_and_says_how_many(
    tmp_path: Path, stays: dict[str, list[tuple[float, float]]], count: int
) -> None:
    for host, members in stays.items():
        trace = Trace(tmp_path / f"pilot-{host}.trace.json", f"group {host}")
        for member, (first_s, last_s) in enumerate(members):
            trace.record(f"{host}{member}", "load", first_s, last_s, 0.0)
        trace.close()
    (tmp_path / "pilot-9.trace.json").write_text("[]")  # its job was gone before its first stage
    title = draw_timeline(tmp_path, jobs(1.0), tmp_path / "out.png")
    assert title.startswith(f"{count} job{'s' * (count > 1)} on one GPU")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_figures_are_those_of_the_runs_and_a_failed_run_keeps_none(tmp_path: Path) -> None:
    result, script = tmp_path / "result.json", tmp_path / "demo.py"
    save(ROUNDS, result)
    script.write_text(
        f"import pathlib, sys; pathlib.Path(sys.argv[2], 'result.json').write_text({result.read_text()!r})"
    )
    runs = demo.runs_of([sys.executable, str(script)], 2)
    assert [run["makespan"] for run in runs] == [{"slurm": 60.0, "shipped": 40.0, "muri-jct": 40.0}] * 2
    runs = [{**run, "load_1min": load} for run, load in zip(runs, (0.2, 0.4), strict=True)]
    assert demo.sentence({"machine": {"cores": 2}, "iterations": 240, "runs": runs}) == (
        "In 2 runs (short jobs of 240 iterations, 2 cores, load 0.2 to 0.4 before each run), Muri as shipped made the "
        "average JCT 1.12 times and the makespan 1.50 times shorter than plain Slurm; `policy: muri-jct` made the "
        "average JCT 1.50 times and the makespan 1.50 times shorter."
    )
    script.write_text("raise SystemExit(3)")
    with pytest.raises(Exception, match="the demo ended with 3; nothing is kept"):
        demo.runs_of([sys.executable, str(script)], 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "hello", "is not a trace of stages"),
        ("a.json", "[\n]", "holds no stage"),
        ("a.json", '{"a": 1}', "is not a trace of stages"),
    ],
)
def test_file_that_is_no_trace_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(TraceFileError, match=message):
        read_slices(path)
    with pytest.raises(TraceFileError, match="cannot read the trace"):
        read_slices(tmp_path / "missing.json")


def test_the_busiest_moment_is_when_most_members_were_there_and_need_not_be_that_of_all() -> None:
    stays = {"1": (0.0, 20.0), "2": (4.0, 10.0), "3": (6.0, 30.0), "4": (25.0, 40.0)}
    slices = [Slice(member, "load", first_s, last_s) for member, (first_s, last_s) in stays.items()]
    assert timeline.busiest_moment_s(slices, 1.0) == 7.5
    assert timeline.busiest_moment_s(slices, 60.0) == 6.0
    assert {piece.member for piece in timeline.within(slices, 7.5, 1.0)} == {"1", "2", "3"}


def test_a_picture_shows_who_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[str]] = []
    monkeypatch.setattr(timeline, "_draw_members", lambda _axes, _shown, names, _begin_s: drawn.append([*names]))
    slices = [Slice(member, "load", at_s, at_s + 1.0) for member, at_s in (("7", 0.0), ("12", 0.5), ("13", 5.0))]
    timeline.draw(slices, 0.0, 2.0, tmp_path / "out.png")
    assert drawn == [["7", "12"]]


def test_a_picture_of_nothing_and_one_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    slices = [Slice("7", "load", 0.0, 1.0)]
    with pytest.raises(UsageError, match="nothing happened"):
        timeline.draw(slices, 100.0, 4.0, tmp_path / "out.png")
    with pytest.raises(UsageError, match="cannot write the picture"):
        timeline.draw(slices, 0.0, 4.0, tmp_path / "out.gif?")
