"""The demo's cluster: one node with a stand-in GPU for training, two for dry runs."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sandbox import lifecycle
from sandbox.cluster import SUITES, Partition, Shape
from sandbox.driver import Driver
from sandbox.support import Progress

CHECKOUT = Path(__file__).resolve().parents[2]
STATE_DIR = "/var/lib/muri"
TRAIN, PROFILE = "train", "profile"

CONFIG = f"""\
policy: muri-s
partitions: [{TRAIN}]
state_dir: {STATE_DIR}
profiling:
  mode: dry-run
  partition: {PROFILE}
  least_confidence: 0 # other programs of this machine may disturb the few cores
host:
  telemetry_s: 5
  poll_s: 1
  trace: true
"""


@dataclass(frozen=True)
class JobRecord:
    """One job as Slurm tells it; times in seconds since the epoch, 0 while unknown."""

    job_id: int
    name: str
    state: str
    submit_s: float
    start_s: float
    end_s: float
    exit_code: int

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state not in {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED"}

    @property
    def jct_s(self) -> float:
        """Job completion time: from submission to end."""
        return self.end_s - self.submit_s


class DemoError(Exception):
    """The demo cannot go on; the text says why."""


class Cluster:
    """The demo's sandbox."""

    def __init__(self, driver: Driver) -> None:
        """Bind to a running sandbox."""
        self.driver = driver

    def run(self, *arguments: str, user: str = "root") -> str:
        """Run a command in the sandbox and return its output."""
        return self.driver.run(*arguments, user=user).stdout

    def jobs(self) -> dict[int, JobRecord]:
        """Return every job that Slurm remembers."""
        listed = json.loads(self.run("squeue", "--json", "--states=all"))["jobs"]
        return {job["job_id"]: _record(job) for job in listed}

    def submit(self, options: Sequence[str], script: Sequence[str]) -> int:
        """Submit a job as alice and return its id."""
        return self.driver.submit(f"--partition={TRAIN}", *options, *script)


def _number(value: object) -> int:
    return int(value.get("number", 0)) if isinstance(value, dict) else int(value or 0)  # type: ignore[call-overload]


def _record(job: dict) -> JobRecord:  # type: ignore[type-arg]
    state = job["job_state"]
    code = job.get("exit_code") or {}
    return JobRecord(
        job_id=job["job_id"],
        name=job["name"],
        state=state[0] if isinstance(state, list) else state,
        submit_s=_number(job["submit_time"]),
        start_s=_number(job["start_time"]),
        end_s=_number(job["end_time"]),
        exit_code=_number(code.get("return_code")) if isinstance(code, dict) else int(code) >> 8,
    )


@contextmanager
def demo_cluster(name: str = "demo") -> Iterator[Cluster]:
    """Start the demo's own sandbox, and take it down at the end, however the demo ends."""
    partitions = (Partition(TRAIN, "n1"), Partition(PROFILE, "n[2-3]"))
    lifecycle.down(name, Progress())
    lifecycle.up(name, SUITES["forky"], Shape(nodes=3, gpus_per_node=1, extra_partitions=partitions), Progress())
    driver = Driver.of(name)
    try:
        driver.write("/etc/muri/muri.yaml", CONFIG, user="root", mode="0644")
        yield Cluster(driver)
    finally:
        lifecycle.down(name, Progress())


@contextmanager
def controller(cluster: Cluster, interval_s: float, log: Path) -> Iterator[None]:
    """Run the controller in the sandbox for as long as the block lasts.

    Raises:
        DemoError: It ended by itself.
    """
    process = cluster.driver.popen("sh", "-c", f"exec muri-controller --interval {interval_s} 2>&1", user="root")
    status = ("test", "-e", f"{STATE_DIR}/status.json")
    try:
        cluster.driver.wait_until(
            lambda: cluster.driver.run(*status, user="root", check=False).returncode == 0, "the first cycle"
        )
        yield
        if process.poll() is not None:
            raise DemoError(f"the controller ended by itself; see {log}")
    finally:
        process.terminate()
        log.write_text(process.communicate()[0])
