"""Submitting as the user with stand-ins for setpriv, sbatch, squeue and scontrol."""

import errno
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from recorded_slurm import row
from stand_in_commands import Commands

from muri.slurm_plugin.gateway import submit_as
from muri.slurm_plugin.gateway.base import GatewayError, SlurmUnreachableError, SubmissionTimeoutError
from muri.slurm_plugin.gateway.commands import CommandGateway
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.gateway.submit_as import Submissions, become, sbatch_arguments, submit
from muri.slurm_plugin.records.cluster import JobChange, NewJob

MARK = "muri-pilot:abc"
SCRIPT = "#!/bin/sh\nexec true \udce9\n"
SQUEUE = """\
for field in os.environ["SQUEUE_FORMAT2"].split(","):
    name, _, mark = field.partition(":0")
    sys.stdout.write({record!r}[name] + mark)
print()
"""
SETPRIV = "os.execvp(sys.argv[sys.argv.index('--') + 1], sys.argv[sys.argv.index('--') + 1:])"


def new_job(**fields: object) -> NewJob:
    values = {"name": "n; rm", "uid": 1001, "gid": 1001, "script": SCRIPT, "environment": {"A": "b c\n"},
              "partition": "main", "admin_comment": MARK, **fields}  # fmt: skip
    return NewJob(**values)  # type: ignore[arg-type]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    stand_ins = Commands(tmp_path)
    stand_ins.add("setpriv", body=SETPRIV)
    stand_ins.add("sbatch", "17;invented\n")
    stand_ins.add("scancel")
    known(stand_ins)
    return stand_ins


def known(stand_ins: Commands, now_s: float = 0.0, **fields: object) -> None:
    """Let squeue show job 17, submitted just now, and scontrol slurmctld's time."""
    record = row("26.05.5", "bare") | {
        "JobID": "17", "ArrayJobID": "17", "Name": "n; rm", "Comment": MARK, "SubmitTime": str(int(time.time()) + 1),
    }  # fmt: skip
    record |= {name: str(value) for name, value in fields.items()}
    stand_ins.add("squeue", body=SQUEUE.format(record=record))
    stand_ins.add("scontrol", f"Configuration data as of {int(now_s or time.time())}\nSLURM_VERSION = 26.05.5\n")


def test_sbatch_runs_as_the_user_and_root_only_tags(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SBATCH_PARTITION", "SLURM_JOB_ID", "SLURM_JWT", "HOME"):
        monkeypatch.setenv(name, "leak")
    assert submit(SlurmCommands(), new_job()) == 17
    (_, setpriv), (_, sbatch), (_, config), (_, look), (_, update), (_, release) = commands.calls()
    assert config["argv"] == ["show", "config"]
    assert setpriv["argv"][:8] == [
        "--reuid=1001", "--regid=1001", "--init-groups", "--inh-caps=-all", "--ambient-caps=-all",
        "--bounding-set=-all", "--no-new-privs", "--",
    ]  # type: ignore[index]  # fmt: skip
    assert sbatch["files"] == ["A=b c\n\0"]
    assert sbatch["stdin"] == SCRIPT
    assert {"--job-name=n; rm", "--hold", f"--comment={MARK}", "--export=ALL"} <= set(sbatch["argv"])  # type: ignore[call-overload]
    assert "leak" not in sbatch["env"].values()  # type: ignore[attr-defined]
    assert "--jobs=17" in look["argv"]  # type: ignore[operator]
    assert update["argv"] == ["update", "JobId=17", f"AdminComment={MARK}", "Comment="]
    assert release["argv"] == ["release", "17"]


OF_2311 = """\
if any(argument.startswith("--export-file") for argument in sys.argv):
    sys.exit("sbatch: unrecognized option '--export-file=9'")
"""


def test_where_sbatch_reads_no_file_of_variables_a_shell_of_the_users_sets_them(commands: Commands) -> None:
    commands.add("sbatch", "17;invented\n", body=OF_2311)
    variables = {"A": "b 'c\n$(id)", "SBATCH_PARTITION": "leak", "LD_PRELOAD": "", "BASH_FUNC_x%%": "leak"}
    assert submit(SlurmCommands(), new_job(environment=variables)) == 17
    refused, sbatch = (call for name, call in commands.calls() if name == "sbatch")
    assert sbatch["argv"] == refused["argv"][:-1]  # type: ignore[index]
    assert {"A": variables["A"], "LD_PRELOAD": ""}.items() <= sbatch["env"].items()  # type: ignore[attr-defined]
    assert "leak" not in sbatch["env"].values()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "fields",
    [
        {"UserID": 1002},
        {"Name": "other"},
        {"Comment": "muri-pilot:guess"},
        {"JobID": 3},
        {"Reason": "JobHeldAdmin"},
        {"Reason": "JobHoldMaxRequeue"},
        {"Reason": "Priority", "PriorityLong": 4711},
        {"State": "RUNNING"},
        {"State": "SPECIAL_EXIT"},
        {"ArrayTaskID": 5},
        {"ArrayTaskID": "1-3"},
        {"HetJobID": 17},
        {"RestartCnt": 1},
        {"admin_comment": "muri:on"},
        {"SubmitTime": 0},
        {"SubmitTime": int(time.time()) - 3600},
        {"SubmitTime": 5_000_000, "now_s": 5_000_060},
    ],
)
def test_a_job_that_the_users_process_lied_about_is_left_alone(commands: Commands, fields: dict[str, Any]) -> None:
    known(commands, **fields)
    with pytest.raises(GatewayError, match="job 17, which sbatch named"):
        submit(SlurmCommands(), new_job())
    assert [name for name, _ in commands.calls()] == ["setpriv", "sbatch", "scontrol", "squeue"]


def test_a_job_with_the_option_is_kept_by_job_submit_and_changed_by_nobody(commands: Commands) -> None:
    known(commands, Reason="Licenses", PriorityLong=4711, admin_comment="muri:on muri-gate:licence")
    assert submit(SlurmCommands(), new_job(muri="model=m")) == 17
    calls = commands.calls()
    assert [name for name, _ in calls] == ["setpriv", "sbatch", "scontrol", "squeue"]
    assert "--muri=model=m" in calls[1][1]["argv"]
    assert "--hold" not in calls[1][1]["argv"]
    for fields in ({"UserID": 1002}, {"admin_comment": "muri:on muri-state:{}"}, {"SubmitTime": 0}):
        known(commands, **fields)
        with pytest.raises(GatewayError, match="it is left alone"):
            submit(SlurmCommands(), new_job(muri="model=m"))


def test_nothing_else_becomes_a_user() -> None:
    product = Path(submit_as.__file__).parents[2]
    becomes = re.compile(r"""["'](setpriv|runuser|su|sudo)["']|os\.set\w*[ug]ids?\(|\buser=\w*uid\b""")
    rooms = ("launcher", "muri", "policies", "profiler", "simulator", "slurm_plugin")
    named = {path for room in rooms for path in (product / room).rglob("*.py") if becomes.search(path.read_text())}
    assert named == {Path(submit_as.__file__)}


def test_slurmctlds_own_clock_tells_when_a_job_was_submitted(commands: Commands) -> None:
    known(commands, SubmitTime=5_000_000, now_s=5_000_001, admin_comment="a site's own")
    assert submit(SlurmCommands(), new_job()) == 17


@pytest.mark.parametrize("output", ["", "17\n18\n", "x", "1" * 400, "17 --uid=0", "١٧"])
def test_output_that_is_no_job_id_is_refused(commands: Commands, output: str) -> None:
    commands.add("sbatch", output)
    with pytest.raises(GatewayError, match="instead of a job id"):
        submit(SlurmCommands(), new_job())
    assert [name for name, _ in commands.calls()] == ["setpriv", "sbatch"]


def test_the_users_words_never_end_the_cycle(commands: Commands) -> None:
    commands.add("sbatch", stderr="Unable to contact slurm controller (connect failure)\n", code=1)
    with pytest.raises(GatewayError, match="Unable to contact") as caught:
        submit(SlurmCommands(), new_job())
    assert not isinstance(caught.value, SlurmUnreachableError)


def test_slurmctld_that_does_not_answer_root_either_ends_it(commands: Commands) -> None:
    commands.add("sbatch", stderr="sbatch: error: Batch job submission failed: Unable to contact\n", code=1)
    commands.add("scontrol", stderr="Unable to contact slurm controller (connect failure)\n", code=1)
    with pytest.raises(SlurmUnreachableError):
        submit(SlurmCommands(), new_job())


@pytest.mark.parametrize(
    "body",
    [
        "import signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "sys.stdout.write('x' * 10**7); sys.stdout.flush()",
        "import time; time.sleep(60)",
    ],
)
def test_a_stopped_talkative_or_slow_process_costs_one_job(
    commands: Commands, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit_as, "_CHILD_ENDS_WITHIN_S", 0.2)
    commands.add("sbatch", body=body)
    with pytest.raises(GatewayError, match=r"did not end within 0\.2 s") as caught:
        submit(SlurmCommands(), new_job())
    assert not isinstance(caught.value, SlurmUnreachableError)


def test_what_tells_the_controller_to_stop_does_not_end_a_submission(commands: Commands) -> None:
    """Sent by sbatch itself, as no test can hit the moment between its fork and its session."""
    known(commands)
    commands.add("sbatch", "17\n", body="import signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert submit(SlurmCommands(), new_job()) == 17


def test_a_user_whose_process_stood_still_costs_one_time_limit(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    submissions = Submissions(SlurmCommands(), lambda: None, lambda: now_s[0])
    commands.add("sbatch", body="import signal; os.kill(os.getpid(), signal.SIGSTOP)")
    with monkeypatch.context() as patched, pytest.raises(SubmissionTimeoutError, match=r"did not end within 0\.2 s"):
        patched.setattr(submit_as, "_CHILD_ENDS_WITHIN_S", 0.2)
        submissions.submit(new_job())
    commands.add("sbatch", "17\n")
    known(commands, UserID=1002)
    assert submissions.submit(new_job(uid=1002)) == 17
    known(commands)
    calls = len(commands.calls())
    with pytest.raises(SubmissionTimeoutError, match=r"uid 1001 .* for 5 minutes"):
        submissions.submit(new_job())
    assert len(commands.calls()) == calls
    now_s[0] += 301
    assert submissions.submit(new_job()) == 17


def test_a_user_who_leaves_no_process_to_start_excludes_nobody(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "subprocess.Popen", Mock(side_effect=BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"))
    )
    with pytest.raises(SlurmUnreachableError, match="cannot be started"):
        submit(SlurmCommands(), new_job())


ITS_OWN = JobChange(time_limit_s=1200, gpu_request="gres/gpu:1", admin_comment="muri:on", owner=(1001, 1001))


def test_a_request_is_given_back_in_its_users_name_and_root_changes_only_the_rest(commands: Commands) -> None:
    """Slurm exempts what root has changed from the limits of partition and QOS."""
    gateway = CommandGateway()
    known(commands, TimeLimit="20:00", **{"tres-per-node": "gres/gpu:1"})
    begun = len(commands.calls())
    gateway.modify(17, ITS_OWN)
    (_, setpriv), (_, own), (looks, _), (_, rest) = commands.calls()[begun:]
    assert setpriv["argv"][:2] == ["--reuid=1001", "--regid=1001"]  # type: ignore[index]
    assert own["argv"] == ["update", "JobId=17", "TresPerNode=gres/gpu:1", "TimeLimit=20"]
    assert (looks, rest["argv"]) == ("squeue", ["update", "JobId=17", "AdminComment=muri:on"])


@pytest.mark.parametrize("lie", ["sys.exit(0)", "sys.exit('slurm_update error: Unable to contact slurm controller')"])
def test_a_user_who_keeps_a_request_from_being_given_back_keeps_the_gate_closed(commands: Commands, lie: str) -> None:
    gateway = CommandGateway()
    known(commands, TimeLimit="40:00", **{"tres-per-node": "gres/gpu:0"})
    commands.add("setpriv", body=lie)
    with pytest.raises(GatewayError, match="as its user") as caught:
        gateway.modify(17, ITS_OWN)
    assert not isinstance(caught.value, SlurmUnreachableError)
    assert not any("AdminComment" in " ".join(call["argv"]) for _, call in commands.calls())  # type: ignore[arg-type]


def test_job_that_cannot_be_tagged_is_not_left_behind(commands: Commands) -> None:
    body = "if 'update' in sys.argv: sys.exit('slurm_update error: Access/permission denied')"
    commands.add("scontrol", body=body)
    with pytest.raises(GatewayError, match="permission denied"):
        submit(SlurmCommands(), new_job())
    assert commands.calls()[-1] == ("scancel", commands.calls()[-1][1])
    assert commands.calls()[-1][1]["argv"] == ["17"]


def test_whoever_is_not_root_submits_for_himself_only() -> None:
    assert become(1001, 1001, 1001, "submit job 'x'") == []
    with pytest.raises(GatewayError, match="Run the controller as root"):
        become(1001, 1001, 1002, "submit job 'x'")


def test_sbatch_command_line() -> None:
    job = NewJob(
        "n", 1, 2, "", {}, "p", "acc", "q", "/w", "gres/gpu:a100:2", 2, 3, 100, 61, "n[1-2]", "/o", "", requeue=True,
        licenses="m:1", reservation="r", features="[a*1&b*1]", excluded_nodes="n9",
    )  # fmt: skip
    assert sbatch_arguments(job, "mark") == [
        "sbatch", "--parsable", "--ignore-pbs", "--hold", "--requeue", "--job-name=n", "--partition=p",
        "--account=acc", "--qos=q", "--chdir=/w", "--gres=gpu:a100:2", "--nodes=2", "--ntasks=2", "--cpus-per-task=3",
        "--mem=100M", "--time=2",
        "--nodelist=n[1-2]", "--exclude=n9", "--constraint=[a*1&b*1]", "--licenses=m:1", "--reservation=r",
        "--output=/o", "--input=/dev/null", "--comment=mark",
    ]  # fmt: skip
    assert "--oversubscribe" in sbatch_arguments(replace(job, oversubscribe=True), "mark")
