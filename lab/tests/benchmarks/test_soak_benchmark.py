"""The soaks, in their short forms: leftovers of a real runtime, and effects of signals, pauses and kills."""

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough


def test_survivors_of_a_short_soak_have_the_losses_of_their_runs_alone(benchmark) -> None:
    soak = benchmark("soak")
    kinds = soak.draw_kinds(("stages",), seeds=2, iterations=600)
    found = soak.measure(0.0, 3, kinds, 3.0, print)  # until enough has happened
    assert found["errors"] == []
    assert [bar for bar in soak.bars(found) if not bar.passed] == []
    assert sum(found["jobs"].values()) >= len(soak.MEMBERS)
    assert sum(found["events"].values()) >= soak.LEAST_EVENTS


def test_a_wrong_loss_and_a_wrong_exit_code_are_noticed(benchmark, tmp_path: Path) -> None:
    soak = benchmark("soak")
    kind = soak.Kind("stages", 1, 5)
    watched = soak.Soak(tmp_path, [kind], seed=1)
    reference = watched._reference[kind]
    assert len(reference) == 5
    job = soak.Job(kind, None, tmp_path / "job.log")
    job.log.with_suffix(".out").write_text("")
    job.log.write_text("\n".join(["7", *reference, ""]))
    watched._check(job, 0)
    assert watched.errors == []
    watched._check(job, 75)
    assert "ended with 75" in watched.errors.pop()
    job.log.write_text("\n".join(["7", *reference[:4], ""]))
    watched._check(job, 0)
    assert "ended after 4 of 5" in watched.errors.pop()
    job.log.write_text("\n".join(["7", *reference[:4], "0x1p-3", ""]))
    watched._check(job, 0)
    assert "loss 4 is 0x1p-3" in watched.errors.pop()


def test_short_soak_in_a_real_runtime_leaves_nothing_behind(benchmark) -> None:
    found = benchmark("interleaving_soak").measure(60, lambda text: print(text, file=sys.stderr))
    assert found["threads"][1] <= found["threads"][0]
    assert found["files"][1] <= found["files"][0]
