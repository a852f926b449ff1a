"""A round's cluster: one node with one stand-in GPU, and with Muri its configuration and controller."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sandbox import lifecycle
from sandbox.cluster import SUITES, Shape
from sandbox.driver import Driver
from sandbox.support import Progress

CHECKOUT = Path(__file__).resolve().parents[2]
STATE_DIR = "/var/lib/muri"  # the default
NAME = "demo"

# Muri as shipped, but for one key: groups write down their stages, for the timeline. That changes no plan.
SHIPPED = """\
pilot:
  trace: true
"""
# The same, and one key that decides: `auto` keeps to Slurm's order here, muri-jct lets short jobs go first.
MURI_JCT = SHIPPED + "policy: muri-jct\n"


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
    """A round's sandbox."""

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
        return self.driver.submit(*options, *script)


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
def fresh_cluster(name: str = NAME) -> Iterator[Cluster]:
    """Start a cluster on which nothing has run yet, and take it down at the end, however the round ends."""
    lifecycle.down(name, Progress())
    lifecycle.up(name, SUITES["forky"], Shape(nodes=1, gpus_per_node=1), Progress())
    try:
        yield Cluster(Driver.of(name))
    finally:
        lifecycle.down(name, Progress())


@contextmanager
def controller(cluster: Cluster, config: str, log: Path) -> Iterator[None]:
    """Run the controller in the sandbox, on events as its service does, for as long as the block lasts.

    Raises:
        DemoError: It ended by itself.
    """
    cluster.driver.write("/etc/muri/muri.yaml", config, user="root", mode="0644")
    process = cluster.driver.popen("sh", "-c", "exec muri-controller --interval 360 2>&1", user="root")
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
