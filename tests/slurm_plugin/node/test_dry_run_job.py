"""A dry run: the job that Muri submits for it, and its process, which runs the waiting job's script."""

import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from fake_slurm import make_job

from muri.profiler.dryrun.messages import Limits
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.gateway.base import slurm_error
from muri.slurm_plugin.gateway.slurm_commands import decoded, encoded
from muri.slurm_plugin.node import dry_run, slurm_calls
from muri.slurm_plugin.planning.slurm_requests import arguments_in_line, dry_run_environment, dry_run_job
from muri.slurm_plugin.records.comment_tags import encode_words
from muri.slurm_plugin.records.roles import read_job

# Its result comes in one step, as the launcher's does: the file is read as soon as it is there.
MEASURES = (
    b'#!/bin/sh\n# caf\xe9\nprintf \'{"load_s": %s}\' "$1" > "$MURI_DRY_RUN_RESULT.new"\n'
    b'mv "$MURI_DRY_RUN_RESULT.new" "$MURI_DRY_RUN_RESULT"\nsleep 60\n'
)


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
                line = b"%-16d%-16d%-32s%-32s%-32768s%-32768s\n"
                return decoded(line % (job, job, b"N/A", b"PENDING", self.comments[job], b""))
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


OPTIONS = ["--target", "7", "--token", "t", "--limits", "auto", "--time-limit-s", "240"]


def run_dry(*arguments: str) -> tuple[int, dict]:
    """The command's exit code, and the result that it prints."""
    done = CliRunner().invoke(dry_run.main, [*OPTIONS, "--words", encode_words(arguments)])
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


def test_words_from_the_facts_arrive_byte_for_byte(slurm: Slurm, tmp_path: Path) -> None:
    kept = tmp_path / "words"
    slurm.scripts[7] = b'#!/bin/sh\nfor w; do printf "%s\\0" "$w"; done > ' + bytes(kept) + b"\nexit 3\n"
    given = ["two words", "", "it's $HOME", "a\nb\r", "\udcff", "-x"]
    CliRunner().invoke(dry_run.main, [*OPTIONS, "--words", encode_words(given)])
    assert kept.read_bytes() == b"".join(word.encode(errors="surrogateescape") + b"\0" for word in given)


@pytest.mark.parametrize(("prefix", "told"), [("/home/alice/venv", "/home/alice/venv/bin/python3"), (sys.prefix, None)])
def test_a_python_other_than_the_sites_is_told(slurm: Slurm, prefix: str, told: str | None) -> None:
    result = {"load_s": 1.5, "python": {"executable": "/home/alice/venv/bin/python3", "prefix": prefix}}
    # In one step, as the launcher does: the file is read as soon as it is there.
    written = "cat > \"$MURI_DRY_RUN_RESULT.new\" <<'END'\n" + json.dumps(result) + "\nEND\n"
    script = f'#!/bin/sh\n{written}mv "$MURI_DRY_RUN_RESULT.new" "$MURI_DRY_RUN_RESULT"\nsleep 60\n'
    slurm.scripts[7] = script.encode()
    assert run_dry()[1].get("python") == told
    assert json.loads(slurm.comments[7].split(b"muri-profile:")[1]).get("python") == told


LIMITS = Limits(time_limit_s=240.0)


@pytest.mark.parametrize("line", ["sbatch /home/alice/train.sh", "sbatch --wrap=train", ""])
def test_a_submit_line_without_arguments_tells_none(line):
    assert arguments_in_line(make_job(1, submit_line=line)) == []


def test_the_environment_of_the_old_job_does_not_reach_the_dry_run():
    submitted = {"PATH": "/bin", "SLURM_JOB_ID": "5", "SLURM_SUBMIT_DIR": "/d", "SBATCH_MURI": "1", "MURI_JOB": "on"}
    assert dry_run_environment(submitted, "alice") == {"PATH": "/bin", "SLURM_SUBMIT_DIR": "/d"}


def test_no_text_of_a_user_stands_ahead_of_the_command_and_none_of_it_as_it_is():
    arguments = "7 'x` $(touch /tmp/x) ;\r#SBATCH \udce9"
    job = make_job(1, submit_line=f"sbatch train.sh {arguments}", name="n\n#SBATCH --uid=0", work_dir="/home/alice")
    run = dry_run_job(read_job(job), "t", {}, Config(node_python="printf"))
    assert (run.gpu_request, run.cpu_count, run.uid, run.requeue) == ("gres/gpu:1", 4, 1001, False)
    first, command, rest = run.script.split("\n")
    assert (first, rest) == ("#!/bin/sh", "")
    assert command.startswith("exec printf -m muri.slurm_plugin.node.dry_run --target 1 --token t ")
    assert shlex.split(command)[-2:] == ["--words", encode_words(arguments.split())]


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
