"""The command gateway with stand-ins for Slurm's commands: what is run, and what failures become."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from stand_in_commands import CONFIG, Commands

from muri.slurm_plugin.gateway.base import GatewayError, GatewayUnavailableError, NoSuchJobError, SlurmUnreachableError
from muri.slurm_plugin.gateway.commands import CommandGateway, update_settings
from muri.slurm_plugin.records.cluster import JobChange, NewJob


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Commands(tmp_path)


def test_update_settings() -> None:
    change = JobChange(gpu_request="gres/gpu:0", required_nodes="", cpu_count=1, dependency="", time_limit_s=0)
    assert update_settings(change) == [
        "TresPerNode=gres/gpu:0", "ReqNodeList=", "NumCPUs=1", "MinCPUsNode=1", "Dependency=", "TimeLimit=UNLIMITED",
    ]  # fmt: skip
    assert update_settings(JobChange(gpu_request="gres/gpu:1"), ":") == ["TresPerNode=gres:gpu:1"]
    assert update_settings(JobChange()) == []
    assert update_settings(JobChange(start_now=True)) == ["StartTime=now+2"]
    assert update_settings(JobChange(licenses="")) == ["Licenses="]
    assert update_settings(JobChange(mem_per_cpu_mib=500)) == ["MinMemoryCPU=500"]
    assert update_settings(JobChange(oversubscribe=True)) == ["OverSubscribe=YES"]
    assert update_settings(JobChange(oversubscribe=False)) == []
    with pytest.raises(GatewayError, match="gres/gpu:1"):
        update_settings(JobChange(gpu_request="??:"))


@pytest.mark.parametrize(
    ("stderr", "kind"),
    [
        ("Job has already finished for job 5\nslurm_suspend error: x\n", NoSuchJobError),
        ("slurm_update error: Socket timed out on send/recv operation\n", SlurmUnreachableError),
        ("slurm_load_ctl_conf error:Unable to contact slurm controller (connect failure)\n", SlurmUnreachableError),
        ("Access/permission denied\n", GatewayError),
        ("scontrol: error: job name 'connection refused' is not allowed here\n", GatewayError),
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


def test_a_command_that_a_signal_ended_is_no_refusal(commands: Commands) -> None:
    gateway = CommandGateway()
    commands.add("scontrol", body="import signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(SlurmUnreachableError, match=r"`scontrol` was ended by signal 9"):
        gateway.hold(5)


def test_a_change_of_several_tasks_gpus_sets_the_least_cpus_before(commands: Commands) -> None:
    """Slurm 24.11 and 26.05: all in one change, the job would have one CPU for its two tasks, and never start."""
    gateway = CommandGateway()
    gateway.modify(5, JobChange(gpu_request="gres/gpu:0", cpu_count=1, cpus_per_task=1))
    gateway.modify(6, JobChange(gpu_request="gres/gpu:0", cpu_count=2, cpus_per_task=1))
    changes = [call["argv"][1:] for name, call in commands.calls() if name == "scontrol"][1:]
    assert changes == [
        ["JobId=5", "TresPerNode=gres/gpu:0", "NumCPUs=1", "CPUsPerTask=1", "MinCPUsNode=1"],
        ["JobId=6", "MinCPUsNode=1"],
        ["JobId=6", "TresPerNode=gres/gpu:0", "NumCPUs=2", "CPUsPerTask=1"],
    ]


def test_a_job_loses_figures_for_each_gpu_before_its_gpus(commands: Commands, tmp_path: Path) -> None:
    gateway, way = CommandGateway(), "gres/gpu:0,gres/muri:1"
    refuse = f"cleared = {os.fspath(tmp_path / 'cleared')!r}\nif 'MemPerTres=' in sys.argv:\n    open(cleared, 'w')\n"
    refuse += "elif not os.path.exists(cleared):\n    sys.exit('Invalid generic resource (gres) specification')\n"
    commands.add("scontrol", body=refuse)
    gateway.modify(5, JobChange(gpu_request=way, mem_per_node_mib=64))
    changes = [call["argv"][2:] for name, call in commands.calls() if name == "scontrol"][1:]
    whole = [f"TresPerNode={way}", "MinMemoryNode=64"]
    assert changes == [whole, ["MinMemoryNode=64", "TresPerNode=gres/gpu:0", "CpusPerTres=", "MemPerTres="], whole]


def test_a_signal_to_the_callers_terminal_does_not_reach_a_command(commands: Commands) -> None:
    gateway = CommandGateway()
    commands.add("scontrol", body="sys.exit(os.getsid(0) != os.getpid())")
    gateway.hold(5)


def test_missing_commands_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    with pytest.raises(GatewayUnavailableError, match="'scontrol' is not in PATH"):
        CommandGateway()


@pytest.mark.parametrize("version", ["21.08.8", ""])
def test_too_old_slurm_is_refused(commands: Commands, version: str) -> None:
    commands.add("scontrol", CONFIG.format(version=version))
    with pytest.raises(GatewayUnavailableError, match=r"22\.05 or newer"):
        CommandGateway()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"script": "true"}, "must begin with #!"),
        ({"script": "#!/bin/sh\n#SLURM --bbf=/etc/shadow\nexec true\n"}, "its second line with `exec `"),
        ({"script": "#!/bin/sh\nexec true\r\n"}, "DOS line ends"),
        ({"work_dir": "/home/x\n#"}, "sbatch could misread"),
        ({"partition": "--uid=0"}, "sbatch could misread"),
        ({"environment": {"A=B": ""}}, "'A=B' is malformed"),
        ({"admin_comment": "\0"}, "NUL"),
        ({"cpu_count": 0}, "at least one CPU"),
    ],
)
def test_job_that_slurm_would_misread_is_refused(commands: Commands, fields: dict[str, object], said: str) -> None:
    values = {"name": "n", "uid": 1, "gid": 1, "script": "#!/bin/sh\nexec true\n", "environment": {},
              "partition": "p", **fields}  # fmt: skip
    with pytest.raises(GatewayError, match=said):
        CommandGateway().submit(NewJob(**values))  # type: ignore[arg-type]
    assert [name for name, _ in commands.calls()] == ["scontrol"]


def test_a_drains_changes_need_no_squeue(commands: Commands) -> None:
    commands.add("squeue", stderr="squeue: fatal: broken\n", code=1)
    CommandGateway().end_lease()
    assert "squeue" not in [name for name, _ in commands.calls()]


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
def test_a_process_that_cannot_be_started_ends_the_cycle(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    gateway = CommandGateway()
    monkeypatch.setattr("subprocess.Popen", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(SlurmUnreachableError, match=f"cannot be started: {os.strerror(number)}"):
        gateway.hold(5)


def test_arguments_that_are_too_long_are_their_jobs_fault(commands: Commands) -> None:
    gateway = CommandGateway()
    with pytest.raises(GatewayError, match="Argument list too long") as caught:
        gateway.modify(5, JobChange(admin_comment="x" * 200_000))
    assert not isinstance(caught.value, SlurmUnreachableError)
