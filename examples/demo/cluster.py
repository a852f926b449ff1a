"""The demo's cluster: a sandbox of two nodes with one stand-in GPU each."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
SANDBOX = CHECKOUT / "bin" / "muri-sandbox"
STATE_DIR = "/var/lib/muri"
TRAIN, PROFILE = "train", "profile"

CONFIG = f"""\
policy: muri-s
partitions: [{TRAIN}]
state_dir: {STATE_DIR}
profiling:
  partition: {PROFILE}
host:
  telemetry_s: 2
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
    """Runs commands in one sandbox."""

    def __init__(self, name: str) -> None:
        """Bind to a sandbox by name."""
        self.name = name

    def command(self, *arguments: str, user: str = "root") -> list[str]:
        """Return the command line that runs `arguments` in the sandbox."""
        return [str(SANDBOX), "run", "--name", self.name, "--user", user, "--", *arguments]

    def run(self, *arguments: str, user: str = "root", stdin: str = "") -> str:
        """Run a command in the sandbox and return its output.

        Raises:
            DemoError: The command failed.
        """
        done = subprocess.run(
            self.command(*arguments, user=user), input=stdin, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise DemoError(f"{' '.join(arguments)} failed with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def write(self, path: str, text: str) -> None:
        """Write a file in the sandbox as root."""
        self.run("sh", "-c", 'mkdir -p "$(dirname "$1")" && cat >"$1"', "write", path, stdin=text)

    def jobs(self) -> dict[int, JobRecord]:
        """Return every job that Slurm remembers."""
        listed = json.loads(self.run("squeue", "--json", "--states=all"))["jobs"]
        return {job["job_id"]: _record(job) for job in listed}

    def submit(self, options: Sequence[str], script: Sequence[str]) -> int:
        """Submit a job as alice and return its id."""
        text = self.run("sbatch", "--parsable", f"--partition={TRAIN}", *options, *script, user="alice")
        return int(text.strip().split(";")[0])


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


def _sandbox(verb: str, *options: str) -> None:
    if subprocess.run([str(SANDBOX), verb, *options], check=False).returncode:
        raise DemoError(f"muri-sandbox {verb} failed; its message is above")


@contextmanager
def demo_cluster(name: str = "demo") -> Iterator[Cluster]:
    """Start the demo's own sandbox, and take it down at the end, however the demo ends."""
    _sandbox("down", "--name", name)
    _sandbox(
        "up", "--name", name, "--nodes", "2", "--gpus-per-node", "1",
        "--partition", f"{TRAIN}=n1", "--partition", f"{PROFILE}=n2",
    )  # fmt: skip
    cluster = Cluster(name)
    try:
        cluster.write("/etc/muri/muri.yaml", CONFIG)
        yield cluster
    finally:
        _sandbox("down", "--name", name)


@contextmanager
def controller(cluster: Cluster, interval_s: float, log: Path) -> Iterator[None]:
    """Run the controller in the sandbox for as long as the block lasts."""
    command = cluster.command("muri-controller", "--interval", str(interval_s))
    with log.open("w") as stream, subprocess.Popen(command, stdout=stream, stderr=stream) as process:
        try:
            yield
            if process.poll() is not None:
                raise DemoError(f"the controller ended by itself; see {log}")
        finally:
            subprocess.run(
                cluster.command("pkill", "-TERM", "-f", "muri-controller --interval"), check=False, stdout=sys.stderr
            )
            process.wait()
