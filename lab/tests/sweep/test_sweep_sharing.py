"""What `muri-lab sweep` says of jobs that share GPUs without turns, and of CPUs and memory that are given out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from engine_builders import CPU, GPU, job
from test_sweep_command import printed, refusal

from muri.policies.traits import BatchModel
from muri.simulator.model import Trace
from muri.simulator.traces.schema import write_trace

HEADER = "job_a,job_b,solo_a_iters_per_s,solo_b_iters_per_s,speed_a_fraction,speed_b_fraction"
BATCH = BatchModel(32, 0.0, 1 / 32, fixed_mem_gib=2.0, mem_gib_per_sample=0.25, max_accumulate_steps=4)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two jobs for one GPU of 16 GiB; both fit if one of them divides its batch."""
    jobs = (job(1, 0.0, 400.0, GPU, name="a", batch=BATCH), job(2, 10.0, 400.0, CPU, name="b", batch=BATCH))
    write_trace(Trace("t", jobs), tmp_path / "t.csv")
    return tmp_path / "t.csv"


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """The two models, measured to leave each other alone."""
    file = tmp_path / "pairs.csv"
    file.write_text(f"{HEADER}\na,b,1,1,1.0,1.0\n", encoding="utf-8")
    return file


def figures(capsys: pytest.CaptureFixture[str], policy: str, *words: object) -> dict[str, float]:
    document = json.loads(printed(capsys, *words, "--policy", policy, "--nodes", 1, "--json"))
    found: dict[str, float] = document["policies"][policy]
    return found


def test_measured_pairs_decide_who_shares(trace: Path, pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_gpu = (trace, "--gpus-per-node", 1, "--gpu-mem-gb", 16, "--interference", pairs)
    assert figures(capsys, "sjf", *one_gpu)["avg_jct_s"] == pytest.approx((400 + 790) / 2)
    shared = figures(capsys, "sjf-bsbf", *one_gpu)
    assert shared["avg_jct_s"] == pytest.approx(400.0)
    assert shared["out_of_memory"] == 0
    pairs.write_text(f"{HEADER}\na,b,1,1,0.1,0.1\n", encoding="utf-8")
    assert figures(capsys, "sjf-bsbf", *one_gpu)["avg_jct_s"] == pytest.approx((400 + 790) / 2)


def test_cpus_of_nodes_matter_to_policies_that_give_them_out(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = (trace, "--gpus-per-node", 2, "--cpus-per-node", 8)
    assert figures(capsys, "fifo", *node)["avg_jct_s"] == 400.0
    # Job 2 does nothing but preprocess: with 7 of the 8 CPUs it takes 4/7 of the time.
    assert figures(capsys, "synergy", *node)["avg_jct_s"] < 330.0
    assert figures(capsys, "synergy", trace, "--gpus-per-node", 2)["avg_jct_s"] == 400.0


def test_jobs_of_two_users_share_only_if_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = (replace(job(1, 0.0, 400.0, GPU), user="ann"), replace(job(2, 0.0, 400.0, CPU), user="bob"))
    write_trace(Trace("t", jobs), tmp_path / "t.csv")
    one_gpu = (tmp_path / "t.csv", "--gpus-per-node", 1)
    assert figures(capsys, "muri-jct", *one_gpu)["avg_jct_s"] == 600.0
    assert figures(capsys, "muri-jct", *one_gpu, "--any-user")["avg_jct_s"] == 400.0
    assert "--any-user is not for --model live" in refusal(
        capsys, *one_gpu, "--policy", "muri-jct", "--model", "live", "--any-user"
    )


def test_what_is_missing_or_has_no_effect_is_refused(
    trace: Path, pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = refusal(capsys, trace, "--policy", "muri-jct", "--option", "speed_model=measured")
    assert "give a table with --interference" in " ".join(measured.split())
    reference = (trace, "--policy", "muri-s", "--model", "reference")
    assert "--interference is for --model default" in refusal(capsys, *reference, "--interference", pairs)
    assert "--slowdown is for --model default" in refusal(capsys, *reference, "--slowdown", "utilization")
    assert "line 1" in refusal(capsys, trace, "--policy", "horus", "--interference", trace)
    alone = refusal(capsys, trace, "--policy", "fifo,muri-s", "--slowdown", "utilization")
    assert "names none of them: fifo, muri-s" in " ".join(alone.split())
    for option in ("--cpus-per-node", "--mem-gb-per-node", "--gpu-mem-gb"):
        for amount in ("nan", "inf"):
            assert f"is {amount}; it must be a finite" in refusal(capsys, trace, "--policy", "fifo", option, amount)
