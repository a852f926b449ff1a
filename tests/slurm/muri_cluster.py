"""A sandbox with one GPU to share, a controller to call cycle by cycle, and small training scripts."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from muri.profiler.exchange import to_json
from muri.profiler.records import STAGES, ProfileDetail, ProfileKey, StageProfile
from sandbox.driver import DeadlineError, Driver
from sandbox.support import CONTROLLER

#: Models are measured in dry runs. The machine's cores belong to all tests: its dry runs are disturbed, and all the
#: same tell the stages apart.
DRY_RUNS = pytest.mark.configuration(profiling={"mode": "dry-run"}, tuning={"least_confidence": 0})

TRAIN_PY = """\
import os, sys, time
import muri

iterations, code = int(sys.argv[1]), int(sys.argv[2])
slow = sys.argv[3]
print("started", os.environ["SLURM_JOB_ID"], flush=True)
print("gpus", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
kept = [os.path.expanduser(f"~/keep-{name}") for name in ("training", slow)]
step = 0
while step < iterations or any(map(os.path.exists, kept)):
    step += 1
    for stage in ("load", "preprocess", "propagate", "synchronize"):
        with muri.stage(stage):
            time.sleep(0.07 if stage == slow else 0.01)
print("finished", os.environ["SLURM_JOB_ID"], flush=True)
sys.exit(code)
"""

TRY_GPU_REMOVAL = """\
import sys; from dataclasses import asdict; from pathlib import Path
from muri.files import atomic_json
from muri.slurm_plugin.gateway.commands import CommandGateway
from muri.slurm_plugin.gateway.gpu_removal import place_for
from muri.slurm_plugin.records.limits import NOT_TRIED

gateway = CommandGateway()
snapshot = gateway.snapshot()
found = gateway.gpu_removal(NOT_TRIED, place_for(snapshot.nodes, ()), None, snapshot.taken_s)
atomic_json(Path(sys.argv[1]), asdict(found))
"""

CONTROLLER_PY = """\
#!/usr/bin/env python
from dataclasses import replace
from muri.slurm_plugin import config
from muri.slurm_plugin.cli.admin import controller_main

config.TUNING = replace(config.TUNING, **{tuning})
controller_main()
"""

TRAIN_SH = """\
#!/bin/sh
muri run /home/{user}/train.py "$@"
code=$?
echo "script ends with $code"
exit $code
"""


def keep_gate(driver: Driver) -> None:
    """Withhold the license muri_gate for two hours, as a controller that is at work does.

    job_submit sees changes of reservations to the second: one that is made in the second in which another was deleted
    shows only with its next change.
    """
    update = "scontrol update reservationname=muri_gate endtime=now+7200"
    create = "create reservation flags=LICENSE_ONLY licenses=muri_gate:1000000 user=root starttime=now duration=120"
    make = f"scontrol {create} reservationname=muri_gate && sleep 1 && {update}"
    driver.run("sh", "-c", f"{update} 2>/dev/null || {{ {make}; }}", user="root")


def slow_in(stage: str, key: ProfileKey, dangers: Sequence[str] | None = None) -> StageProfile:
    """The profile of a model whose iterations take 0.1 s, most of it in one stage; `dangers` is for threads to know."""
    detail = ProfileDetail(dangers=None if dangers is None else tuple(dangers))
    times_s = [0.07 if each == stage else 0.01 for each in STAGES]
    return StageProfile(key, *times_s, iteration_s=0.1, iterations=20, detail=detail)


class MuriCluster:
    """What the end-to-end tests do as administrator and as users."""

    configured: Callable[..., dict[str, Any]] = dict
    """Gives the keys of muri.yaml that a test names; conftest.py says how."""

    controller_command = "/root/tuned-controller"  # `muri-controller` with the constants that a test names

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.state_dir = f"/var/lib/muri-{time.monotonic_ns()}"
        self.configure()
        self._know_gpu_removal()
        keep_gate(driver)
        driver.run("sh", "-c", "rm -rf /home/*/keep-* /home/*/.muri", user="root")
        for user in ("alice", "bob"):
            driver.write("train.py", TRAIN_PY, user=user)
            driver.write("train.sh", TRAIN_SH.format(user=user), user=user)

    def _know_gpu_removal(self) -> None:
        """Copy what was found out about taking GPUs away, so that it is tried once for each sandbox."""
        known = "/var/lib/muri-gpu-removal.json"
        if self.driver.run("test", "-f", known, user="root", check=False).returncode != 0:
            self.python(TRY_GPU_REMOVAL, known)
        self.driver.run("install", "-D", "-m", "0600", known, f"{self.state_dir}/gpu-removal.json", user="root")
        self.driver.run("chmod", "0700", self.state_dir, user="root")

    def configure(self, **changes: Any) -> None:
        """Write the controller's configuration: the shipped one, changed for sandboxes and by the test."""
        places = {"state_dir": self.state_dir, "status_dir": f"{self.state_dir}-status"}
        # One partition is Muri's, the others are for what Slurm runs beside it.
        config = {**places, "partitions": ["train"], **self.configured(**changes)}
        # Scripts of seconds on a busy machine: pilots report within a second, and wait long for what starts slowly. A
        # cycle ends with its last action, so that a test can look at what has not started yet.
        quick = {"gate_watch_s": 0, "telemetry_s": 1, "poll_s": 0.5, "attach_timeout_s": 240}
        tuning = {**quick, **config.pop("tuning", {})}
        self.driver.write("/etc/muri/muri.yaml", json.dumps(config), user="root", mode="0644")
        script = CONTROLLER_PY.replace("{tuning}", repr(tuning))
        self.driver.write(self.controller_command, script, user="root", mode="0755")

    def know(self, *profiles: StageProfile) -> None:
        """Import profiles into the controller's store, so that a test need not wait for dry runs."""
        self.profile("import", "-", stdin=to_json(profiles))

    def know_profiles(self, dangers: Sequence[str] | None = None, gpu_type: str = "gpu") -> None:
        """Import profiles of the four kinds."""
        self.know(*(slow_in(slow, ProfileKey(slow, 8, 1, gpu_type), dangers) for slow in STAGES))

    def profile(self, *command: str, stdin: str = "") -> str:
        """Return the output of a verb of `muri profile` on the controller's store."""
        store = ("--store", f"{self.state_dir}/profiles.db")
        return str(self.driver.run("muri", "profile", *command, *store, user="root", stdin=stdin).stdout)

    def pairs(self, *options: str) -> str:
        """What the lab lists of measured and learned pairs in the controller's store."""
        store = ("--store", f"{self.state_dir}/profiles.db")
        return str(self.driver.run("muri-lab", "pair", "--list", *options, *store, user="root").stdout)

    def models(self, *options: str) -> dict[str, dict[str, Any]]:
        """The profiles in the controller's store, by model."""
        return {each["model"]: each for each in json.loads(self.profile("list", "--json", *options))["profiles"]}

    def dry_runs(self) -> set[str]:
        """The dry-run jobs that slurmctld remembers, ended ones too."""
        listed = self.driver.run("squeue", "-h", "-t", "all", "-n", "muri-dryrun", "-o", "%i", user="root").stdout
        return set(listed.split())

    def python(self, code: str, *arguments: str, check: bool = True, stdin: str = "") -> Any:
        """Run Python as root inside, with the project's environment."""
        return self.driver.run("python", "-c", code, *arguments, user="root", check=check, stdin=stdin)

    def submit(self, kind: str, *options: str, user: str = "alice", iterations: int = 30, code: int = 0) -> int:
        """Submit a training job of one kind with --muri."""
        mark = f"--muri=model={kind},batch-size=8,duration={max(1, iterations // 10)}s"
        script = (f"/home/{user}/train.sh", str(iterations), str(code), kind)
        return self.driver.submit("-p", "train", "--gres=gpu:1", mark, *options, *script, user=user)

    def script(self, name: str, text: str, *before: str) -> str:
        """Write a training script of alice's and the job script that runs it, after other lines; returns the latter."""
        self.driver.write(f"{name}.py", text)
        lines = ("#!/bin/sh", *before, f'exec muri run /home/alice/{name}.py "$@"')
        return self.driver.write(f"{name}.sh", "\n".join(lines) + "\n")

    def occupy(self, partition: str = "train", on: str = CONTROLLER, gres: str = "gpu:1") -> None:
        """Have another user use one GPU of a partition, or a share of one."""
        job = self.driver.submit("-p", partition, f"--gres={gres}", "--wrap=exec sleep infinity", user="bob", on=on)
        self.driver.wait_state(job, "RUNNING")

    @contextmanager
    def training(self, *kinds: str, user: str = "alice") -> Iterator[None]:
        """Keep a user's training jobs, or those of some kinds, at work for as long as the test wants."""
        with ExitStack() as ends:
            for kind in kinds or ("training",):
                path = self.driver.write(f"keep-{kind}", "", user=user)
                ends.callback(self.driver.run, "rm", "-f", path, user="root")
            yield

    def start_group(
        self, *kinds: str, request: Sequence[str] = (), gpu_type: str = "gpu", **options: Any
    ) -> tuple[list[int], int]:
        """Submit one job of each kind, which `training` keeps at work, and start them; their ids and their pilot's."""
        self.know_profiles(gpu_type=gpu_type)
        options.setdefault("iterations", 5)
        jobs = [self.submit(kind, *request, **options) for kind in kinds]
        self.cycle()
        for job in jobs:
            assert "muri-grant:" in self.driver.job(job)["AdminComment"], self.explain(job, user="root")
        self.wait_grouped(*jobs)
        (pilot,) = self.pilots()
        return jobs, pilot

    @contextmanager
    def going_back(self, *members: int | str, partition: str = "train") -> Iterator[None]:
        """Wait until members whose group the test kills have their GPUs back, before Slurm may start one.

        So each starts exactly once again. The controller that does it would remember for minutes that nothing starts
        in the partition: what follows needs another.
        """
        with self.no_starts(partition), self.controller():
            yield
            self.driver.wait_until(
                lambda: all("muri" not in self.driver.job(job)["TresPerNode"] for job in members),
                f"the way back of {members}",
            )

    def kill_pilot(self, pilot: int, *members: int | str) -> None:
        """Kill a pilot job, and have a controller send its members back, as in `going_back`."""
        with self.going_back(*members):
            self.driver.run("scancel", "--signal=KILL", str(pilot), user="root")

    @contextmanager
    def no_starts(self, partition: str = "train", *, at_once: bool = True) -> Iterator[None]:
        """Keep Slurm from starting jobs, from now on or once the test closes the partition.

        What goes back to the queue stays there, however late the controller looks.
        """
        update = ("scontrol", "update", f"PartitionName={partition}")
        try:
            if at_once:
                self.driver.run(*update, "State=DOWN", user="root")
            yield
        finally:
            self.driver.run(*update, "State=UP", user="root")

    def cycle(self) -> Any:
        """Run one cycle of the controller."""
        return self.driver.run(self.controller_command, "--once", user="root")

    @contextmanager
    def controller(self, options: str = "--interval 0.5") -> Iterator[None]:
        """Have a controller at work, mostly with two cycles a second; its log is `self.controller_log()`."""
        command = f"exec {self.controller_command} {options} 2>>{self.state_dir}.log"
        process = self.driver.popen("sh", "-c", command, user="root")
        try:
            yield
        finally:
            process.terminate()
            process.communicate(timeout=240)

    def controller_log(self) -> str:
        """What `controller()` has logged so far."""
        return self.driver.read(f"{self.state_dir}.log")

    def cycles_until_ended(self, *jobs: int) -> dict[int, dict[str, str]]:
        """Have a controller at work until all jobs have ended; return their fields."""
        with self.controller():
            return {job: self.driver.wait_state(job) for job in jobs}

    def explain(self, job: int | str, *options: str, user: str = "alice") -> str:
        """What `muri explain` says of a job."""
        return str(self.driver.run("muri", "explain", str(job), *options, user=user).stdout)

    def wait_checkpoint(self, job: int) -> None:
        """Wait until Slurm knows that the job has a checkpoint."""
        self.driver.wait_until(lambda: "muri-checkpoint:" in self.driver.job(job).get("Comment", ""), "a checkpoint")

    def output(self, job: int, user: str = "alice") -> str:
        """Return a job's standard output."""
        return self.driver.read(f"/home/{user}/slurm-{job}.out")

    def queue(self) -> dict[int, dict[str, Any]]:
        """What `muri queue --json` says, by job id."""
        status = json.loads(self.driver.run("muri", "queue", "--json", user="alice").stdout)
        return {job["job_id"]: job for job in status["jobs"]}

    def pilots(self, states: str = "pending,running,completing") -> list[int]:
        """Pilot jobs that wait or run, or are in other states."""
        text = self.driver.run("squeue", "-h", "-o", "%i %j", "-t", states, user="root").stdout
        return [
            int(job) for job, _, name in (line.partition(" ") for line in text.splitlines()) if name.startswith("muri:")
        ]

    def wait_grouped(self, *jobs: int) -> None:
        """Wait until the jobs run as members and have written their first line."""
        for job in jobs:
            try:
                self.driver.wait_state(job, "RUNNING")
            except DeadlineError as error:
                raise AssertionError(self.explain(job, user="root")) from error
        self.driver.wait_until(
            lambda: all("started" in self.output(job, self.driver.job(job)["UserId"].split("(")[0]) for job in jobs),
            f"the start of the members {jobs}",
        )
