"""What the demo leaves behind, and what the README says of it."""

import sys
from pathlib import Path

import pytest
from rich.console import Console

from examples.demo.cluster import MURI_JCT, SHIPPED, JobRecord
from examples.demo.report import draw_timeline, print_table, save
from muri.launcher.script.trace import open_trace
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
        trace = open_trace(tmp_path / f"pilot-{host}.trace.json", f"group {host}")
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
