"""The jobs that Muri submits, and what a dry run does with the user's script."""

import subprocess

import pytest
from fake_slurm import make_job

from muri.profiler.dryrun.messages import Limits
from muri.profiler.records import ProfileKey
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.node import dry_run
from muri.slurm_plugin.planning.slurm_requests import dry_run_environment, dry_run_job, script_arguments

LIMITS = Limits(time_limit_s=20.0)
KEY = ProfileKey("m", 8, 1, "gpu")


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("sbatch --gres=gpu:1 train.sh a b", ["a", "b"]),
        ("sbatch /home/alice/train.sh", []),
        ("sbatch --wrap=train", []),
        ("", []),
    ],
)
def test_arguments_are_read_from_the_submit_line(line, arguments):
    assert script_arguments(make_job(1, submit_line=line)) == arguments


def test_the_environment_of_the_old_job_does_not_reach_the_dry_run():
    submitted = {"PATH": "/bin", "SLURM_JOB_ID": "5", "SLURM_SUBMIT_DIR": "/d", "SBATCH_MURI": "1", "MURI_JOB": "on"}
    assert dry_run_environment(submitted, "alice") == {"PATH": "/bin", "SLURM_SUBMIT_DIR": "/d"}


def test_the_users_script_arrives_byte_for_byte(tmp_path):
    script = "#!/bin/sh\n#SBATCH --muri\necho \"$1\" '`x`' $HOME \\ \n"
    job = dry_run_job(make_job(1, submit_line="sbatch train.sh 7"), KEY, "t", script, {}, Config(node_python="cat"))
    assert (job.gpu_request, job.cpu_count, job.uid, job.requeue) == ("gres/gpu:1", 4, 1001, False)
    # Run with `cat -` in Python's place, the here-document gives the script back.
    text = "\n".join("exec cat <<" + line.split("<<")[1] if "<<" in line else line for line in job.script.split("\n"))
    assert subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True).stdout == script


def test_a_script_is_ended_as_soon_as_its_model_is_measured(tmp_path):
    later = tmp_path / "later"
    script = f'#!/bin/sh\necho \'{{"load_s": 1}}\' > "$MURI_DRY_RUN_RESULT"\nsleep 60\ntouch {later}\n'
    assert dry_run.measure(script.encode(), [], LIMITS) == {"load_s": 1}
    assert not later.exists()


def test_a_script_that_fails_tells_its_last_words():
    result = dry_run.measure(b"#!/bin/sh\necho no such dataset: $1 >&2\nexit 4\n", ["cats"], LIMITS)
    assert "code 4" in result["error"]
    assert "no such dataset: cats" in result["error"]


def test_a_script_that_hangs_is_ended():
    assert "no result within 0.2 s" in dry_run.measure(b"#!/bin/sh\nsleep 60\n", [], Limits(time_limit_s=0.2))["error"]
