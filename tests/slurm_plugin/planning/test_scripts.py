"""The jobs that Muri submits, and a dry run of the user's script."""

import shlex

import pytest
from fake_slurm import make_job

from muri.profiler.dryrun.messages import Limits
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.node import dry_run
from muri.slurm_plugin.planning.slurm_requests import arguments_in_line, dry_run_environment, dry_run_job
from muri.slurm_plugin.records.roles import read_job

LIMITS = Limits(time_limit_s=240.0)


@pytest.mark.parametrize("line", ["sbatch /home/alice/train.sh", "sbatch --wrap=train", ""])
def test_a_submit_line_without_arguments_tells_none(line):
    assert arguments_in_line(make_job(1, submit_line=line)) == []


def test_the_environment_of_the_old_job_does_not_reach_the_dry_run():
    submitted = {"PATH": "/bin", "SLURM_JOB_ID": "5", "SLURM_SUBMIT_DIR": "/d", "SBATCH_MURI": "1", "MURI_JOB": "on"}
    assert dry_run_environment(submitted, "alice") == {"PATH": "/bin", "SLURM_SUBMIT_DIR": "/d"}


def test_no_text_of_a_user_stands_ahead_of_the_command_and_all_of_it_is_quoted():
    arguments = "7 'x` $(touch /tmp/x) ;\r#SBATCH \udce9"
    job = make_job(1, submit_line=f"sbatch train.sh {arguments}", name="n\n#SBATCH --uid=0", work_dir="/home/alice")
    run = dry_run_job(read_job(job), "t", {}, Config(node_python="printf"))
    assert (run.gpu_request, run.cpu_count, run.uid, run.requeue) == ("gres/gpu:1", 4, 1001, False)
    first, command, rest = run.script.split("\n")
    assert (first, rest) == ("#!/bin/sh", "")
    assert command.startswith("exec printf -m muri.slurm_plugin.node.dry_run --target 1 --token t ")
    assert shlex.split(command)[-len(arguments.split()) - 1 :] == ["--", *arguments.split()]


def test_a_dry_run_asks_for_what_its_job_asks_for():
    own = {"reservation": "course", "features": "a100", "excluded_nodes": "n3", "required_nodes": "n1"}
    run = dry_run_job(read_job(make_job(1, licenses="matlab:1,muri_gate:1", **own)), "t", {}, Config())
    assert {name: getattr(run, name) for name in own} == own
    assert run.licenses == "matlab:1"


def test_a_script_is_ended_as_soon_as_its_model_is_measured(tmp_path):
    later = tmp_path / "later"
    told = "$MURI_DRY_RUN_RESULT"
    script = f'#!/bin/sh\necho \'{{"load_s": 1}}\' > "{told}.new"\nmv "{told}.new" "{told}"\nsleep 600\ntouch {later}\n'
    assert dry_run.measure(script.encode(), [], LIMITS) == {"load_s": 1}
    assert not later.exists()


def test_a_script_that_cannot_be_started_is_a_failure_that_says_why():
    result = dry_run.measure(b"#!/no/such/interpreter\n", [], LIMITS)
    assert result["error"].startswith("its script cannot be started from /")
    assert result["error"].endswith(": No such file or directory")


def test_a_script_that_fails_tells_its_last_words():
    result = dry_run.measure(b"#!/bin/sh\necho no such dataset: $1 >&2\nexit 4\n", ["cats"], LIMITS)
    assert "code 4" in result["error"]
    assert "no such dataset: cats" in result["error"]


def test_a_script_that_hangs_is_ended():
    assert "no result within 0.2 s" in dry_run.measure(b"#!/bin/sh\nsleep 60\n", [], Limits(time_limit_s=0.2))["error"]
