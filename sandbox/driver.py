"""Drive a running sandbox from Python: run commands, submit jobs, wait for their states."""

import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from sandbox import daemons
from sandbox import instance as instances
from sandbox.instance import Instance
from sandbox.support import CONTROLLER, Progress, SandboxError

_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w/:-]*)=(.*?)(?=\s[A-Za-z][\w/:-]*=|$)")

#: A wait costs that long only where something hangs: a busy machine may take its time.
DEADLINE_S = 240.0

#: States in which a job has ended for good.
FINAL_STATES = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
)


class CommandError(SandboxError):
    """A command in the sandbox failed."""


class DeadlineError(SandboxError):
    """Something did not happen in time."""


def parse_job(text: str) -> dict[str, str]:
    """Read what `scontrol show job` prints about one job.

    Free text that itself holds ` name=` (a comment, say) is cut there; the fields Slurm sets are exact.
    """
    fields: dict[str, str] = {}
    for line in text.splitlines():
        for name, value in _FIELD.findall(line.strip()):
            fields.setdefault(name, value.strip())
    return fields


@dataclass(frozen=True)
class Driver:
    """A running sandbox as tests and the demo use it.

    Every wait has a deadline in seconds and raises `DeadlineError` with what was last seen.
    """

    instance: Instance

    @classmethod
    def of(cls, name: str) -> "Driver":
        """Drive the running sandbox of that name."""
        return cls(instances.require(name))

    def popen(self, *command: str, user: str = "alice", chdir: str | None = None,
              env: Mapping[str, str] | None = None, on: str = CONTROLLER) -> subprocess.Popen[str]:  # fmt: skip
        """Start a command inside; terminating the process terminates the command."""
        line = instances.command_line(self.instance, user, list(command), chdir or self.home(user), env, on=on)
        return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *command: str, user: str = "alice", chdir: str | None = None, check: bool = True,
            env: Mapping[str, str] | None = None, stdin: str = "", timeout_s: float = DEADLINE_S,
            on: str = CONTROLLER) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a command inside as root, alice or bob; on a site also on its login host or a node.

        Raises:
            CommandError: It failed and `check` is set.
        """
        line = instances.command_line(self.instance, user, list(command), chdir or self.home(user), env, on=on)
        # Slurm passes on what users name their jobs, in any encoding.
        done = subprocess.run(
            line, input=stdin, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
        if check and done.returncode != 0:
            raise CommandError(
                f"`{' '.join(command)}` as {user} on {on} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done

    @staticmethod
    def home(user: str) -> str:
        """Return a user's home directory inside."""
        return "/root" if user == "root" else f"/home/{user}"

    def write(self, path: str, text: str, user: str = "alice", mode: str = "0755", on: str = CONTROLLER) -> str:
        """Write a file inside, relative to the user's home, and return its path."""
        script = 'mkdir -p "$(dirname "$1")" && cat > "$1" && chmod "$2" "$1" && realpath "$1"'
        return self.run("sh", "-c", script, "sh", path, mode, user=user, stdin=text, on=on).stdout.strip()

    def read(self, path: str, user: str = "root", on: str = CONTROLLER) -> str:
        """Read a file inside; a relative path is relative to the user's home."""
        return self.run("cat", path, user=user, on=on).stdout

    def submit(self, *arguments: str, user: str = "alice", chdir: str | None = None,
               env: Mapping[str, str] | None = None, on: str = CONTROLLER) -> int:  # fmt: skip
        """Run `sbatch` with these arguments and return the job's id."""
        done = self.run("sbatch", "--parsable", *arguments, user=user, chdir=chdir, env=env, on=on)
        return int(done.stdout.strip().split(";")[0])

    def job(self, job_id: int | str) -> dict[str, str]:
        """Return the fields of `scontrol show job`; a task of an array is named 12_3."""
        return parse_job(self.run("scontrol", "show", "job", str(job_id), user="root").stdout)

    def wait_until(self, reached: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Poll until `reached` returns true. A failing command means not yet, such as `cat` of a missing file."""
        limit = time.monotonic() + deadline_s
        while True:
            failed: CommandError | None = None
            try:
                if reached():
                    return
            except CommandError as error:
                failed = error
            if time.monotonic() > limit:
                raise DeadlineError(f"{what} did not happen within {deadline_s:.0f} s") from failed
            time.sleep(0.1)

    def wait_state(self, job_id: int | str, *states: str, deadline_s: float = DEADLINE_S) -> dict[str, str]:
        """Wait for a job to be in one of the states (default: any final one); returns its fields."""
        wanted = set(states) or FINAL_STATES
        limit = time.monotonic() + deadline_s
        while (fields := self.job(job_id))["JobState"] not in wanted:
            if time.monotonic() > limit:
                raise DeadlineError(
                    f"job {job_id} is {fields['JobState']} ({fields.get('Reason')}) after {deadline_s:.0f} s, "
                    f"not {' or '.join(sorted(wanted))}"
                )
            time.sleep(0.1)
        return fields

    def wait_reason(self, job_id: int, reason: str) -> None:
        """Wait until Slurm says why a job waits.

        Without slurmdbd Slurm 23.11 and 24.05 say so of no job: there, until their scheduler has passed it over.
        """
        words = f"sched: JobId={job_id} has invalid account"
        before = self.read(daemons.CONTROLLER_LOG).count(words)
        self.wait_until(
            lambda: self.job(job_id)["Reason"] == reason or self.read(daemons.CONTROLLER_LOG).count(words) > before,
            f"the reason {reason} of job {job_id}",
        )

    def cancel_all(self) -> None:
        """Cancel every job and wait until none is left in the queue."""
        cancel = "for user in alice bob root; do scancel --user $user; done"
        self.run("sh", "-c", cancel, user="root", check=False)
        queue = ("squeue", "--noheader", "--format", "%i")
        self.wait_until(lambda: not self.run(*queue, user="root").stdout.strip(), "an empty queue")

    def reconfigure(self) -> None:
        """Have Slurm's daemons read their configuration again.

        Since 23.11 slurmctld answers when its successor has started. On a busy machine scontrol may not wait that long.
        """

        def begun() -> str:
            config = self.run("scontrol", "show", "config").stdout
            return next(line for line in config.splitlines() if line.startswith("BOOT_TIME"))

        before = begun()
        try:
            self.run("scontrol", "reconfigure", user="root")
        except CommandError as error:
            if "timed out" not in str(error):
                raise
            self.wait_until(lambda: begun() != before, "slurmctld's successor")

    def restart_controller(self) -> None:
        """Restart slurmctld, which keeps its state."""
        with self.no_controller():
            pass

    @contextmanager
    def no_controller(self) -> Iterator[None]:
        """Keep slurmctld away for a while; it keeps its state."""
        daemons.stop_controller(self.instance)
        try:
            yield
        finally:
            daemons.start_controller(self.instance, Progress())
