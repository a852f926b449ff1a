"""A sandbox with one GPU to share, a controller to call cycle by cycle, and small training scripts."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from muri.profiler.records import STAGES, ProfileKey
from sandbox.driver import Driver

TRAIN_PY = """\
import os, sys, time
import muri

iterations, code = int(sys.argv[1]), int(sys.argv[2])
slow = sys.argv[3]
print("started", os.environ["SLURM_JOB_ID"], flush=True)
print("gpus", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
step = 0
while step < iterations or os.path.exists(os.path.expanduser("~/keep-training")):
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
from muri.slurm_plugin.records.gpu_removal import NOT_TRIED

gateway = CommandGateway()
snapshot = gateway.snapshot()
found = gateway.gpu_removal(NOT_TRIED, place_for(snapshot.nodes, ()), None, snapshot.taken_s)
atomic_json(Path(sys.argv[1]), asdict(found))
"""

TRAIN_SH = """\
#!/bin/sh
muri run /home/{user}/train.py "$@"
code=$?
echo "script ends with $code"
exit $code
"""


def keep_gate(driver: Driver) -> None:
    """Withhold the licence muri_gate for two hours, as a controller that is at work does.

    job_submit sees changes of reservations to the second: one that is made in the second in which another was deleted
    shows only with its next change.
    """
    create = "create reservation flags=LICENSE_ONLY licenses=muri_gate:1000000 user=root starttime=now duration=120"
    update = "scontrol update reservationname=muri_gate endtime=now+7200"
    driver.run("sh", "-c", f"scontrol {create} reservationname=muri_gate && sleep 1; {update}", user="root")


class MuriCluster:
    """What the end-to-end tests do as administrator and as users."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.state_dir = f"/var/lib/muri-{time.monotonic_ns()}"
        self.configure()
        self._know_gpu_removal()
        keep_gate(driver)
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
        """Write the controller's configuration."""
        host = {"telemetry_s": 1, "poll_s": 0.5, "attach_timeout_s": 240}
        places = {"state_dir": self.state_dir, "status_dir": f"{self.state_dir}-status"}
        config = {**places, "gate_watch_s": 0, "policy": "muri-s", "partitions": ["train"], "host": host, **changes}
        # The machine's cores belong to all tests: its dry runs are disturbed, and all the same tell the stages apart.
        config["profiling"] = {"mode": "dry-run", "least_confidence": 0, **changes.get("profiling", {})}
        self.driver.write("/etc/muri/muri.yaml", json.dumps(config), user="root", mode="0644")

    def know_profiles(self, dangers: Sequence[str] | None = None) -> None:
        """Import profiles of the four kinds, so that a test need not wait for dry runs."""
        for slow in STAGES:
            times_s = [0.07 if stage == slow else 0.01 for stage in STAGES]
            self.know_profile(ProfileKey(slow, 8, 1, "gpu"), times_s, dangers)

    def know_profile(self, key: ProfileKey, stage_s: Sequence[float], dangers: Sequence[str] | None = None) -> None:
        """Import the profile of a model whose iterations take 0.1 s, with what its runs did that threads must not."""
        figures: dict[str, Any] = dict(zip((f"{stage}_s" for stage in STAGES), stage_s, strict=True))
        figures["dangers"] = dangers
        self.python(
            "import sys, json; from pathlib import Path; from muri.profiler.store import ProfileStore;"
            "from muri.profiler.records import *; a = json.loads(sys.argv[1]); b = json.loads(sys.argv[2]);"
            "d = b.pop('dangers'); d = ProfileDetail(dangers=None if d is None else tuple(d));"
            f"s = ProfileStore(Path('{self.state_dir}/profiles.db'));"
            "s.put(StageProfile(key=ProfileKey(**a), **b, iteration_s=0.1, iterations=20, detail=d)); s.close()",
            json.dumps(asdict(key)),
            json.dumps(figures),
        )

    def python(self, code: str, *arguments: str, check: bool = True, stdin: str = "") -> Any:
        """Run Python as root inside, with the project's environment."""
        return self.driver.run("python", "-c", code, *arguments, user="root", check=check, stdin=stdin)

    def submit(self, kind: str, *options: str, user: str = "alice", iterations: int = 30, code: int = 0) -> int:
        """Submit a training job of one kind with --muri."""
        mark = f"--muri=model={kind},batch-size=8,duration={max(1, iterations // 10)}s"
        script = (f"/home/{user}/train.sh", str(iterations), str(code), kind)
        return self.driver.submit("-p", "train", "--gres=gpu:1", mark, *options, *script, user=user)

    @contextmanager
    def training(self, user: str = "alice") -> Iterator[None]:
        """Keep a user's training jobs at work, whatever their number of iterations, however slow the machine is."""
        self.driver.write("keep-training", "", user=user)
        try:
            yield
        finally:
            self.driver.run("rm", "-f", f"/home/{user}/keep-training", user="root")

    @contextmanager
    def no_starts(self, partition: str = "train") -> Iterator[None]:
        """Keep Slurm from starting jobs: what goes back to the queue stays there, however late the controller looks."""
        self.driver.run("scontrol", "update", f"PartitionName={partition}", "State=DOWN", user="root")
        try:
            yield
        finally:
            self.driver.run("scontrol", "update", f"PartitionName={partition}", "State=UP", user="root")

    def cycle(self, *, check: bool = True) -> Any:
        """Run one cycle of the controller."""
        return self.driver.run("muri-controller", "--once", user="root", check=check)

    @contextmanager
    def controller(self) -> Iterator[None]:
        """Have a controller at work, two cycles a second; its log is `self.controller_log()`."""
        command = f"exec muri-controller --interval 0.5 2>>{self.state_dir}.log"
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

    def output(self, job: int, user: str = "alice") -> str:
        """What a job wrote to its standard output file."""
        return self.driver.read(f"/home/{user}/slurm-{job}.out")

    def queue(self) -> dict[int, dict[str, Any]]:
        """What `muri queue --json` says, by job id."""
        status = json.loads(self.driver.run("muri", "queue", "--json", user="alice").stdout)
        return {job["job_id"]: job for job in status["jobs"]}

    def hosts(self) -> list[int]:
        """Host jobs that wait or run."""
        text = self.driver.run("squeue", "-h", "-n", "muri-host", "-o", "%i", user="root").stdout
        return [int(word) for word in text.split()]

    def wait_grouped(self, *jobs: int) -> None:
        """Wait until the jobs run as members and have written their first line."""
        for job in jobs:
            self.driver.wait_state(job, "RUNNING")
        self.driver.wait_until(
            lambda: all("started" in self.output(job, self.driver.job(job)["UserId"].split("(")[0]) for job in jobs),
            f"the start of the members {jobs}",
        )
