"""A cluster with accounts, QOS and limits, and its administrators' actions, for tests of the site's rules."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from accounting_records import Record, complete_records
from muri_cluster import MuriCluster

from muri.slurm_plugin.records import comment_tags as tags
from sandbox.driver import Driver

UNTIL_GO_PY = """\
import os, sys, time
import muri

print("started", os.environ["SLURM_JOB_ID"], flush=True)
while not os.path.exists("/home/alice/go"):
    for stage in ("load", "preprocess", "propagate", "synchronize"):
        with muri.stage(stage):
            time.sleep(0.07 if stage == sys.argv[1] else 0.01)
"""

#: Slurm 25.05 starts scripts with SIGCHLD blocked, where `wait` of Debian's sh never ends.
UNTIL_GO_SH = """\
#!/bin/bash
trap 'touch /home/alice/usr1.$SLURM_JOB_ID' USR1
muri run /home/alice/until_go.py "$1" &
training=$!
while kill -0 $training 2>/dev/null; do
    wait $training
    code=$?
done
exit $code
"""


class SiteCluster(MuriCluster):
    """What administrators and users do where a site has rules; each node has a partition of its own, `on1` to `on4`."""

    def __init__(self, driver: Driver, gateway: str) -> None:
        self.gateway = gateway
        super().__init__(driver)
        driver.run("rm", "-f", "go")
        driver.write("until_go.py", UNTIL_GO_PY)
        driver.write("until_go.sh", UNTIL_GO_SH)
        self.know_profiles()

    def configure(self, **changes: object) -> None:
        """Write the configuration: every partition is Muri's."""
        super().configure(**{"partitions": [], "gateway": self.gateway, **changes})

    def pair(self, *options: str, user: str = "alice", iterations: int = 15) -> list[int]:
        """Submit two jobs that are better off in a group."""
        return [self.submit(kind, *options, user=user, iterations=iterations) for kind in ("load", "propagate")]

    def until_go(self, kind: str, *options: str) -> int:
        """Submit a job of alice's that trains until `go` is called; it leaves `usr1.JOB` when SIGUSR1 arrives."""
        mark = f"--muri=model={kind},batch-size=8,duration=60s"
        return self.driver.submit("--gres=gpu:1", mark, *options, "/home/alice/until_go.sh", kind)

    def go(self) -> None:
        """Let all jobs of `until_go` end."""
        self.driver.write("go", "")

    def block(self, partition: str, gpus: int) -> int:
        """Start an ordinary job that keeps GPUs of a node until it is cancelled."""
        options = ("-p", partition, f"--gres=gpu:{gpus}", "--time=5")
        job = self.driver.submit(*options, "--wrap=exec sleep 600", user="bob")
        self.driver.wait_state(job, "RUNNING")
        return job

    def root(self, *command: str) -> str:
        """Run a command as an administrator and return its output."""
        return self.driver.run(*command, user="root").stdout

    @contextmanager
    def qos(self, name: str, **limits: str) -> Iterator[None]:
        """Within, a QOS of all users has these limits."""
        sacctmgr = ("sacctmgr", "--immediate")
        self.root(*sacctmgr, "add", "qos", name)
        try:
            self.root(*sacctmgr, "modify", "qos", name, "set", *(f"{key}={value}" for key, value in limits.items()))
            self.root(*sacctmgr, "modify", "user", "where", "name=alice,bob", "set", f"qos+={name}")
            yield
        finally:
            self.driver.cancel_all()
            self.root(*sacctmgr, "delete", "qos", name)

    @contextmanager
    def reservation(self, name: str, *settings: str) -> Iterator[None]:
        """Within, nodes are reserved."""
        self.root("scontrol", "create", "reservation", f"reservationname={name}", *settings)
        try:
            yield
        finally:
            self.driver.cancel_all()
            self.root("scontrol", "delete", f"reservationname={name}")

    @contextmanager
    def partition_setting(self, partition: str, setting: str, afterwards: str) -> Iterator[None]:
        """Within, a partition has another setting."""
        with ExitStack() as stack:
            stack.callback(self.root, "scontrol", "update", f"partitionname={partition}", afterwards)
            self.root("scontrol", "update", f"partitionname={partition}", setting)
            yield

    def pilot(self, job: int) -> int | None:
        """Return the pilot job of a job's group, None when it is in none."""
        state = tags.parse_state(self.driver.job(job).get("AdminComment", ""))
        return None if state is None else state.pilot

    def runs(self, *jobs: int) -> dict[int, Record]:
        """Wait for the jobs' ends and return the last run of each, as accounting tells it."""
        return {run.job_id: run for run in complete_records(self.driver, *jobs)}

    def barred(self) -> dict[str, object]:
        """Return which jobs Muri will not group again, and why."""
        code = (
            "import json, sys; from pathlib import Path; from muri.slurm_plugin.records.journal import *;"
            "print(json.dumps(Journal(Path(sys.argv[1])).facts(EXCLUSION)))"
        )
        return dict(json.loads(self.python(code, f"{self.state_dir}/journal.db").stdout))
