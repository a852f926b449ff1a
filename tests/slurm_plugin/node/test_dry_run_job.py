"""The dry run's own process: it reads the waiting job's script from Slurm and leaves its result in a comment."""

import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from muri.slurm_plugin.gateway.base import slurm_error
from muri.slurm_plugin.gateway.slurm_commands import decoded, encoded
from muri.slurm_plugin.node import dry_run, slurm_calls

MEASURES = b'#!/bin/sh\n# caf\xe9\nprintf \'{"load_s": %s}\' "$1" > "$MURI_DRY_RUN_RESULT"\nsleep 60\n'


class Slurm:
    """Answers scontrol and squeue for the waiting job 7 and the dry run 9."""

    def __init__(self) -> None:
        self.scripts = {7: MEASURES}
        self.comments = {7: b"line 1\nmuri-profile:{} \xe9", 9: b""}

    def run(self, action: str, arguments: list[str]) -> str:
        match arguments:
            case ["scontrol", "write", "batch_script", job, "-"]:
                return decoded(self.scripts.get(int(job), b""))
            case ["squeue", *_, jobs, "--states=all"]:
                job = int(jobs.removeprefix("--jobs="))
                if job not in self.comments:
                    raise slurm_error(action, "slurm_load_jobs error: Invalid job id specified")
                return decoded(b"%-16d%-8192s\n" % (job, self.comments[job]))
            case ["scontrol", "update", job, comment]:
                self.comments[int(job.removeprefix("jobid="))] = encoded(comment.removeprefix("comment="))
                return ""
        raise AssertionError(arguments)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """Slurm with both jobs."""
    slurm = Slurm()
    monkeypatch.setattr(slurm_calls, "_COMMANDS", SimpleNamespace(run=slurm.run))
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    return slurm


def run_dry(*arguments: str) -> tuple[int, dict]:
    """The command's exit code, and the result that it prints."""
    options = ["--target", "7", "--token", "t", "--limits", "auto", "--time-limit-s", "20", "--", *arguments]
    done = CliRunner().invoke(dry_run.main, options)
    return done.exit_code, json.loads(done.stdout)


def test_the_script_runs_byte_for_byte_with_its_arguments_and_the_comment_keeps_its_text(slurm: Slurm) -> None:
    assert run_dry("1.5") == (0, {"load_s": 1.5})
    assert slurm.comments[7].split(b" muri-profile:")[0] == b"line 1 \xe9"
    assert json.loads(slurm.comments[7].split(b"muri-profile:")[1]) == {"detail": {}, "load_s": 1.5, "token": "t"}


def test_a_job_that_is_gone_is_an_error_in_the_dry_runs_own_comment(slurm: Slurm) -> None:
    del slurm.comments[7], slurm.scripts[7]
    code, result = run_dry()
    assert (code, result["error"]) == (1, "cannot read the script of job 7: it has ended, or has none")
    assert json.loads(slurm.comments[9].split(b"muri-profile:")[1])["error"] == result["error"]
