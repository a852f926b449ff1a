"""The command gateway with stand-ins for Slurm's commands: what is run, and what failures become."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from muri.slurm_plugin.gateway.base import GatewayError, GatewayUnavailableError, NoSuchJobError, SlurmUnreachableError
from muri.slurm_plugin.gateway.commands import (
    CommandGateway,
    SlurmCommands,
    sbatch_arguments,
    update_settings,
    without_directives,
)
from muri.slurm_plugin.records.cluster import JobChange, NewJob

CONFIG = "ClusterName = invented\nStateSaveLocation = /nowhere\nSLURM_VERSION = {version}\n"


STAND_IN = """#!{python}
import json, os, sys
fds = [int(argument.split("=")[1]) for argument in sys.argv if argument.startswith("--export-file")]
files = [open(fd, "rb").read().decode() for fd in fds]
entry = dict(argv=sys.argv[1:], env=dict(os.environ), files=files, stdin=sys.stdin.read() if files else "")
with open("{log}", "a") as log:
    log.write(json.dumps(["{name}", entry]) + "\\n")
{body}
sys.stdout.write(open("{path}.out").read())
sys.stderr.write(open("{path}.err").read())
sys.exit({code})
"""


class Commands:
    """Scripts in a directory of their own, which write down how they were called."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "log"
        self.add("scontrol", CONFIG.format(version="26.05.5"))

    def add(self, name: str, stdout: str = "", stderr: str = "", code: int = 0, body: str = "") -> None:
        path = self.directory / name
        for stream, text in (("out", stdout), ("err", stderr)):
            (self.directory / f"{name}.{stream}").write_text(text, encoding="utf-8")
        path.write_text(
            STAND_IN.format(python=sys.executable, log=self.log, name=name, path=path, code=code, body=body),
            encoding="utf-8",
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def calls(self) -> list[tuple[str, dict[str, object]]]:
        return [tuple(json.loads(line)) for line in self.log.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Commands(tmp_path)


def test_job_is_submitted_with_its_environment_and_nothing_of_the_callers(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "leak")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("LD_PRELOAD", "")
    commands.add("sbatch", "17;invented\n")
    text = "a, b\n'\"$(id)`;é"
    job = NewJob("n; rm", 1001, 1001, "#!/bin/sh\n#SBATCH -N4\ntrue\n", {"A": text}, "main", admin_comment=text)
    assert CommandGateway().submit(job) == 17
    (_, sbatch), (_, update), (_, release) = commands.calls()[1:]
    assert sbatch["files"] == [f"A={text}\0"]
    assert sbatch["stdin"] == "#!/bin/sh\n# SBATCH -N4\ntrue\n"
    assert {"--job-name=n; rm", "--hold", f"--comment={text}", "--export=ALL"} <= set(sbatch["argv"])  # type: ignore[call-overload]
    assert set(sbatch["env"]) <= {"PATH", "HOME", "LC_ALL", "TZ", "SLURM_CONF", "LC_CTYPE", "LD_LIBRARY_PATH"}  # type: ignore[call-overload]
    assert update["argv"] == ["update", "JobId=17", f"AdminComment={text}", "Comment="]
    assert release["argv"] == ["release", "17"]


def test_job_that_cannot_be_tagged_is_not_left_behind(commands: Commands) -> None:
    gateway = CommandGateway()
    commands.add("sbatch", "17\n")
    commands.add("scontrol", stderr="slurm_update error: Access/permission denied\n", code=1)
    commands.add("scancel")
    with pytest.raises(GatewayError, match="permission denied"):
        gateway.submit(NewJob("n", 1, 1, "#!/bin/sh\n", {}, "main", admin_comment="x"))
    assert commands.calls()[-1][1]["argv"] == ["17"]


def test_sbatch_command_line() -> None:
    job = NewJob(
        "n", 1, 2, "", {}, "p", "acc", "q", "/w", "gres/gpu:a100:2", 2, 3, 100, 61, "n[1-2]", "/o", "", requeue=True
    )
    assert sbatch_arguments(job) == [
        "sbatch", "--parsable", "--requeue", "--uid=1", "--gid=2", "--job-name=n", "--partition=p", "--account=acc",
        "--qos=q", "--chdir=/w", "--gres=gpu:a100:2", "--nodes=2", "--ntasks=2", "--cpus-per-task=3", "--mem=100M",
        "--time=2", "--nodelist=n[1-2]", "--output=/o", "--input=/dev/null",
    ]  # fmt: skip


def test_update_settings() -> None:
    change = JobChange(gpu_request="gres/gpu:0", required_nodes="", cpu_count=1, dependency="", time_limit_s=0)
    assert update_settings(change) == [
        "TresPerNode=gres/gpu:0", "ReqNodeList=", "NumCPUs=1", "MinCPUsNode=1", "Dependency=", "TimeLimit=UNLIMITED",
    ]  # fmt: skip
    assert update_settings(JobChange(gpu_request="gres/gpu:1"), ":") == ["TresPerNode=gres:gpu:1"]
    assert update_settings(JobChange()) == []
    assert update_settings(JobChange(start_now=True)) == ["StartTime=now"]
    with pytest.raises(GatewayError, match="gres/gpu:1"):
        update_settings(JobChange(gpu_request="??:"))


@pytest.mark.parametrize(
    ("stderr", "kind"),
    [
        ("slurm_suspend error: Invalid job id specified\n", NoSuchJobError),
        ("Job has already finished for job 5\nslurm_suspend error: x\n", NoSuchJobError),
        ("Unable to contact slurm controller (connect failure)\n", SlurmUnreachableError),
        ("slurm_update error: Socket timed out on send/recv operation\n", SlurmUnreachableError),
        ("Access/permission denied\n", GatewayError),
        ("", GatewayError),
    ],
)
def test_slurms_words_become_errors(commands: Commands, stderr: str, kind: type[GatewayError]) -> None:
    gateway = CommandGateway()
    commands.add("scontrol", stderr=stderr, code=1)
    with pytest.raises(GatewayError) as caught:
        gateway.hold(5)
    assert type(caught.value) is kind
    assert "hold job 5" in str(caught.value)
    assert (stderr.splitlines() or ["no reason"])[0] in str(caught.value)


def test_hanging_command_counts_as_unreachable(commands: Commands) -> None:
    commands.add("scontrol", body="import time; time.sleep(60)")
    with pytest.raises(SlurmUnreachableError, match=r"within 0\.3 s"):
        CommandGateway(SlurmCommands(timeout_s=0.3))


def test_missing_commands_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    with pytest.raises(GatewayUnavailableError, match="'scontrol' is not in PATH"):
        CommandGateway()


@pytest.mark.parametrize("version", ["21.08.8", ""])
def test_too_old_slurm_is_refused(commands: Commands, version: str) -> None:
    commands.add("scontrol", CONFIG.format(version=version))
    with pytest.raises(GatewayUnavailableError, match=r"22\.05 or newer"):
        CommandGateway()


def test_only_directives_are_switched_off() -> None:
    script = "#!/bin/sh\n#SBATCH -N4\n#PBS -l x\n## SBATCH\necho '#SBATCH'\n"
    assert without_directives(script) == "#!/bin/sh\n# SBATCH -N4\n# PBS -l x\n## SBATCH\necho '#SBATCH'\n"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"script": "true"}, "must begin with #!"),
        ({"script": "#!/bin/sh\r\n"}, "DOS line ends"),
        ({"environment": {"A=B": ""}}, "'A=B' is malformed"),
        ({"admin_comment": "\0"}, "NUL"),
        ({"cpu_count": 0}, "at least one CPU"),
    ],
)
def test_job_that_slurm_would_misread_is_refused(commands: Commands, fields: dict[str, object], said: str) -> None:
    values = {"name": "n", "uid": 1, "gid": 1, "script": "#!/bin/sh\n", "environment": {}, "partition": "p", **fields}
    with pytest.raises(GatewayError, match=said):
        CommandGateway().submit(NewJob(**values))  # type: ignore[arg-type]
    assert [name for name, _ in commands.calls()] == ["scontrol"]
