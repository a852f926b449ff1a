"""The dry run's own process: it reads the waiting job's script from Slurm and leaves its result in a comment."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from muri.slurm_plugin.gateway.base import slurm_error
from muri.slurm_plugin.gateway.slurm_commands import decoded, encoded
from muri.slurm_plugin.node import dry_run, slurm_calls
from muri.slurm_plugin.records.comment_tags import encode_words

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
    done = CliRunner().invoke(dry_run.main, [*OPTIONS, "--", *arguments])
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
