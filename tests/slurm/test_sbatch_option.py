"""`sbatch --muri` on a real Slurm: what users see, what reaches slurmctld and the job."""

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from muri_cluster import keep_gate

from sandbox.driver import Driver

PLUGIN = "/opt/muri/spank/muri_spank.so"
MODULE = "/opt/muri/job_submit/muri.lua"
GPU = "--gres=gpu:1"
KEY_LIST = ["model=NAME", "batch-size=N", "duration=TIME", "checkpoint ", "alone ", "min-speed=X", "opportunistic "]
Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Cluster:
    """A sandbox as its users and its administrator see it."""

    driver: Driver

    def run(self, *command: str, user: str = "alice", **variables: str) -> Done:
        return self.driver.run(*command, user=user, chdir="/tmp", check=False, env=variables)

    def root(self, script: str) -> str:
        return self.driver.run("sh", "-ec", script, user="root").stdout

    def write(self, path: str, text: str) -> None:
        self.driver.write(path, text, user="root", mode="0644")

    def submit(self, *options: str, script: str = "true") -> int:
        """Submit a script; Slurm's own complaints go to standard error, apart from the output."""
        return job_id(self.run("sbatch", "-o", "/tmp/out-%j", "-e", "/tmp/err-%j", *options, f"--wrap={script}"))

    def comment(self, job: int) -> str:
        """AdminComment without the gate, the facts and what tells of the script."""
        text, found = re.subn(r" muri-script:[0-9a-f]{16}", "", self.driver.job(job).get("AdminComment", ""))
        assert found == int("muri:" in text and "model=" not in text), text
        text = text.replace(" muri-calls:no", "")
        for pattern in (r" muri-facts:1(\.[A-Za-z0-9_~-]*){4}", " muri-gate:licence"):
            text, found = re.subn(pattern, "", text)
            assert found == int("muri:" in text), text
        return text

    def is_kept(self, job: int) -> bool:
        return "muri_gate" in self.driver.job(job)["Licenses"]

    def start(self, job: int | str) -> None:
        """Take the license away, as the controller does."""
        self.root(f"scontrol update jobid={job} licenses=")

    @contextmanager
    def submitting_nothing(self) -> Iterator[None]:
        """Check that no job is created; jobs of earlier tests may still be ending meanwhile."""
        before = self._next_job_id()
        yield
        assert self._next_job_id() == before

    def _next_job_id(self) -> int:
        return int(self.root("scontrol show config | sed -n 's/^NEXT_JOB_ID *= //p'"))

    def output_of(self, job: int) -> str:
        """Wait until a job has ended well and return its output."""
        assert self.driver.wait_state(job)["JobState"] == "COMPLETED"
        return self.root(f"cat /tmp/out-{job}")


def job_id(done: Done) -> int:
    found = re.search(r"Submitted batch job (\d+)", done.stdout)
    assert found, done.stdout + done.stderr
    return int(found.group(1))


@pytest.fixture
def cluster(gated: Driver) -> Cluster:
    return Cluster(gated)


@pytest.fixture
def script(cluster: Cluster) -> Callable[..., str]:
    """Put a job script with these options into the sandbox."""

    def write(*options: str) -> str:
        lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in (*options, GPU, "-o /tmp/out-%j")), "env"]
        cluster.write("/tmp/job.sh", "\n".join(lines) + "\n")
        return "/tmp/job.sh"

    return write


def test_help_teaches_the_option(cluster: Cluster) -> None:
    for command in ("sbatch", "srun", "salloc"):
        text = cluster.run(command, "--help").stdout
        assert "--muri=[key=value,...]" in text
        assert "--no-muri" in text
        assert "model=NAME" in text


def test_a_gpu_batch_job_is_tagged_and_waits_for_the_license(cluster: Cluster) -> None:
    options = "model=resnet18,alone,checkpoint=yes,duration=1-00:30,batch-size=64"
    job = cluster.submit(f"--muri={options}", GPU)
    assert cluster.comment(job) == "muri:model=resnet18,batch-size=64,duration=88200,checkpoint=1,alone=1"
    assert cluster.is_kept(job)


def test_every_way_to_ask_for_gpus(cluster: Cluster) -> None:
    for asked in ("--gres=gpu:1", "--gpus=1", "--gpus-per-node=1", "--gpus-per-task=1 --ntasks=1",
                  "--gpus-per-socket=1 --sockets-per-node=1"):  # fmt: skip
        job = cluster.submit("--muri", *asked.split())
        assert cluster.comment(job) == "muri:on"
        assert cluster.is_kept(job)


def test_a_promised_speed_is_kept_in_the_tag(cluster: Cluster) -> None:
    job = cluster.submit("--muri=min-speed=0.80,model=m", GPU)
    assert cluster.comment(job) == "muri:model=m,min-speed=0.8"
    _, line, *_ = cluster.run("muri", "queue", MURI_CONFIG="/dev/null").stdout.splitlines()
    assert line.split() == [str(job), "alice", "m", "waiting", "-", "-", "0.80", "-", "-"]


MISSPELT = 'muri: {}=modle=x: unknown key "modle"; did you mean "model"?'
TWICE = "given twice with different values"


@pytest.mark.parametrize(
    ("options", "variable", "complaint"),
    [
        ("--muri=modle=x", "", MISSPELT.format("--muri")),
        ("", "modle=x", MISSPELT.format("SBATCH_MURI")),  # although the plugin is optional
        ("--muri=min-speed=2", "", "muri: --muri=min-speed=2: min-speed=2: not a number from 0 to 0.999"),
        ("--muri=model=a --muri=model=b", "", f"model is {TWICE} (a and b)"),
        ("--muri --no-muri", "", "--muri and --no-muri contradict each other"),
    ],
)
def test_malformed_and_contradictory_options_submit_nothing(
    cluster: Cluster, options: str, variable: str, complaint: str
) -> None:
    with cluster.submitting_nothing():
        done = cluster.run("sbatch", *options.split(), GPU, "--wrap=true", SBATCH_MURI=variable)
    assert done.returncode != 0
    assert complaint in done.stderr


@pytest.mark.parametrize("command", ["sbatch", "srun", "salloc"])
def test_who_misspells_a_key_is_told_the_valid_ones(cluster: Cluster, command: str) -> None:
    with cluster.submitting_nothing():
        done = cluster.run(command, "--muri=modle=x", GPU, *(["--wrap=true"] if command == "sbatch" else ["true"]))
    assert done.returncode != 0
    assert all(key in done.stderr for key in KEY_LIST)


@pytest.mark.parametrize(
    ("in_script", "variable", "command_line", "comment"),
    [
        (["--muri=model=a,alone"], None, [], "muri:model=a,alone=1"),
        (["--muri=model=a,alone"], None, ["--muri=model=b"], "muri:model=b,alone=1"),
        (["--muri=model=a"], "batch-size=8", [], "muri:model=a,batch-size=8"),
        (["--muri=model=a"], "model=b", ["--muri=model=c"], "muri:model=c"),
        (["--muri=model=a", "--muri=model=a"], None, ["--muri", "--muri"], "muri:model=a"),
        (["--muri"], None, ["--no-muri"], ""),
        (["--no-muri"], None, ["--muri"], "muri:on"),
        ([], "1", [], "muri:on"),
        ([], "model=x", [], "muri:model=x"),
        ([], "0", [], ""),
        ([], "no", [], ""),
        ([], "", [], ""),
        ([], "1", ["--no-muri"], ""),
        ([], "modle=x", ["--no-muri"], ""),
        ([], None, [], ""),
    ],
)
def test_script_environment_and_command_line(
    cluster: Cluster,
    script: Callable[..., str],
    in_script: list[str],
    variable: str | None,
    command_line: list[str],
    comment: str,
) -> None:
    environment = {} if variable is None else {"SBATCH_MURI": variable}
    job = job_id(cluster.run("sbatch", *command_line, script(*in_script), **environment))
    assert cluster.comment(job) == comment
    assert cluster.is_kept(job) == bool(comment)


def test_a_contradiction_inside_the_script_is_refused(cluster: Cluster, script: Callable[..., str]) -> None:
    done = cluster.run("sbatch", script("--muri=model=a", "--muri=model=b"))
    assert done.returncode != 0
    assert "given twice" in done.stderr


def test_options_after_the_script_belong_to_the_script(cluster: Cluster, script: Callable[..., str]) -> None:
    job = job_id(cluster.run("sbatch", script("--muri=model=a"), "--muri=model=b", "--no-muri"))
    assert cluster.comment(job) == "muri:model=a"


def test_the_mark_is_in_the_script_and_its_steps(cluster: Cluster) -> None:
    lines = "echo script $MURI_JOB; srun --export=NONE /usr/bin/env | sed -n s/^MURI_JOB=/step./p"
    options = ("--muri=model=m", GPU)
    for job in [
        cluster.submit(*options, f"--export={export}", script=f"PATH=/usr/bin:/bin; {lines}")
        for export in ("ALL", "NONE", "HOME")
    ]:
        cluster.start(job)
        assert cluster.output_of(job).split("\n")[:2] == ["script model=m", "step.model=m"]


def test_srun_and_salloc_start_at_once_and_set_the_mark(cluster: Cluster) -> None:
    direct = cluster.run("srun", "--muri=model=m", GPU, "sh", "-c", "echo $MURI_JOB")
    allocation = cluster.run("salloc", "--muri=model=m", GPU, "srun", "sh", "-c", "echo $MURI_JOB")
    for done in (direct, allocation):
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "model=m"
        message = "muri: submitted as an ordinary job: interactive jobs start at once and are never grouped"
        assert message in done.stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["-o", "/tmp/out-%j", "--wrap=echo ran"], "muri: submitted as an ordinary job: it asks for no GPU"),
        ([GPU, "-o", "/tmp/out-%j", "--wrap=echo ran", ":", GPU], "heterogeneous jobs are never grouped"),
    ],
)
def test_what_cannot_be_grouped_runs_and_its_user_is_told_why(cluster: Cluster, options: list[str], why: str) -> None:
    done = cluster.run("sbatch", "--muri", *options)
    assert why in done.stderr
    assert cluster.output_of(job_id(done)) == "ran\n"


def test_only_asking_when_a_job_would_start_is_answered_as_without_muri(cluster: Cluster) -> None:
    for option in ("--test-only", "--test"):
        done = cluster.run("sbatch", "--muri=model=m", option, GPU, "-t5", "--wrap=true")
        assert (done.returncode, done.stdout) == (0, ""), done
        assert re.search(r"muri: tested as an ordinary job(.|\n)* Job \d+ to start at ", done.stderr), done
    assert cluster.is_kept(cluster.submit("--muri", GPU, "--comment=--test-only", script="true --test-only"))
    done = cluster.run("sbatch", "--muri=modle=x", "--test-only", GPU, "--wrap=true")
    assert done.returncode != 0
    assert MISSPELT.format("--muri") in done.stderr


def test_jobs_submitted_from_a_muri_job_are_not_muri_s_unasked(cluster: Cluster) -> None:
    inner = f"sbatch -o /tmp/inner-%j {GPU} --wrap='echo [$MURI_JOB]'; sbatch --muri=model=in {GPU} --wrap=true"
    job = cluster.submit("--muri=model=outer", GPU, script=inner)
    cluster.start(job)
    plain, marked = map(int, re.findall(r"batch job (\d+)", cluster.output_of(job)))
    assert cluster.comment(plain) == ""
    assert not cluster.is_kept(plain)
    assert cluster.comment(marked) == "muri:model=in"


def test_a_step_may_have_a_mark_of_its_own(cluster: Cluster) -> None:
    show = "sh -c 'echo step-$MURI_JOB'"
    steps = f"srun {show}; srun --muri=alone {show}; srun --no-muri {show}"
    job = cluster.submit("--muri=model=m", GPU, script=steps)
    cluster.start(job)
    assert cluster.output_of(job).split() == ["step-model=m", "step-alone", "step-"]


def test_a_hold_of_the_user_s_own_stays_beside_the_gate(cluster: Cluster) -> None:
    job = cluster.submit("--muri", "--hold", GPU, script="echo ran")
    assert cluster.comment(job) == "muri:on"
    assert cluster.is_kept(job)
    cluster.start(job)
    fields = cluster.driver.job(job)
    assert (fields["JobState"], fields["Reason"]) == ("PENDING", "JobHeldUser")
    assert cluster.run("scontrol", "release", str(job)).returncode == 0
    assert cluster.output_of(job) == "ran\n"


def test_a_waiting_job_keeps_its_priority_and_starts_when_the_lease_ends(cluster: Cluster) -> None:
    job = cluster.submit("--muri", GPU, script="echo ran")
    fields = cluster.driver.job(job)
    assert fields["Priority"] != "0"
    assert fields["Reason"] in {"Licenses", "None"}
    time.sleep(1)  # job_submit would not see two changes of a reservation in one second: see keep_gate
    cluster.root("scontrol delete reservationname=muri_gate")
    try:
        assert cluster.output_of(job) == "ran\n"
        late = cluster.run("sbatch", "--muri", GPU, "-o", "/tmp/out-%j", "--wrap=echo ran")
        assert "muri: no controller is running; submitted as an ordinary job" in late.stderr
        assert cluster.output_of(job_id(late)) == "ran\n"
    finally:
        keep_gate(cluster.driver)


def test_every_task_of_an_array_keeps_the_tag(cluster: Cluster) -> None:
    job = cluster.submit("--muri=model=m", "--array=1-2", GPU)
    cluster.start(f"{job}_1")
    for task in (f"{job}_1", f"{job}_2"):
        assert "AdminComment=muri:model=m" in cluster.root(f"scontrol show job {task}")


FAILING_PLUGIN = """
#include <slurm/spank.h>
SPANK_PLUGIN(muri, 1)
#define FAIL(hook) int hook(spank_t s, int c, char **v) { (void)s; (void)c; (void)v; return -1; }
FAIL(slurm_spank_init)
FAIL(slurm_spank_init_post_opt)
FAIL(slurm_spank_local_user_init)
FAIL(slurm_spank_user_init)
FAIL(slurm_spank_task_init)
FAIL(slurm_spank_exit)
"""


@pytest.fixture
def breakable(cluster: Cluster) -> Iterator[Cluster]:
    cluster.write("/tmp/bad.c", FAILING_PLUGIN)
    cluster.root(f"cp {PLUGIN} /tmp/good.so; cp /etc/slurm/plugstack.conf /tmp/good.conf")
    yield cluster
    cluster.root(f"rm -f {PLUGIN}; cp /tmp/good.so {PLUGIN}; cp /tmp/good.conf /etc/slurm/plugstack.conf")


def assert_ordinary_jobs_run(cluster: Cluster) -> None:
    job = cluster.submit(GPU, script="echo script; srun echo step")
    assert cluster.output_of(job) == "script\nstep\n"
    assert cluster.run("srun", GPU, "echo", "direct").stdout == "direct\n"


@pytest.mark.parametrize(
    "damage",
    [f"rm {PLUGIN}", f"rm {PLUGIN}; echo garbage > {PLUGIN}", f"rm {PLUGIN}; cc -shared -fPIC -o {PLUGIN} /tmp/bad.c"],
    ids=["deleted", "garbage", "failing"],
)
def test_ordinary_jobs_run_with_a_broken_plugin(breakable: Cluster, damage: str) -> None:
    marked = breakable.submit("--muri=model=m", GPU, script="echo script; srun echo step")
    breakable.root(damage)
    assert_ordinary_jobs_run(breakable)
    refused = breakable.run("sbatch", "--muri", GPU, "--wrap=true")
    assert refused.returncode != 0
    assert "--muri" in refused.stderr
    # A job marked before the plugin broke is still an ordinary job to Slurm.
    breakable.start(marked)
    assert breakable.output_of(marked) == "script\nstep\n"


def test_an_unknown_plugstack_argument_is_named_and_harmless(breakable: Cluster) -> None:
    breakable.root(f"echo 'optional {PLUGIN} shade=red' > /etc/slurm/plugstack.conf")
    done = breakable.run("sbatch", "--muri=model=m", GPU, "--wrap=true")
    assert 'muri: plugstack.conf: unknown argument "shade=red" ignored' in done.stderr
    assert breakable.comment(job_id(done)) == "muri:model=m"
    assert_ordinary_jobs_run(breakable)


@pytest.fixture
def broken_module(cluster: Cluster) -> Iterator[Cluster]:
    """A muri.lua that doesn't parse; slurmctld reloads its script when that is newer than before."""
    reload = "touch -d '+{} seconds' /etc/slurm/job_submit.lua"
    cluster.root(f"cp {MODULE} /tmp/good.lua; echo 'not Lua' > {MODULE}; {reload.format(2)}")
    yield cluster
    cluster.root(f"cp /tmp/good.lua {MODULE}; {reload.format(4)}")


def test_jobs_run_with_a_broken_job_submit_module(broken_module: Cluster) -> None:
    assert_ordinary_jobs_run(broken_module)
    job = broken_module.submit("--muri", GPU, script="echo ran")
    assert broken_module.comment(job) == ""
    assert broken_module.output_of(job) == "ran\n"
    assert "cannot load muri.lua, --muri has no effect" in broken_module.root("cat /var/log/slurmctld.log")
