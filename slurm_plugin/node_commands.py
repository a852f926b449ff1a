"""Run Slurm's commands: no shell, a clean environment, a time limit, Slurm's words on failure."""

import os
import subprocess
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muri.slurm_plugin.gateway import GatewayUnavailableError, SlurmUnreachableError
from muri.slurm_plugin.slurm_errors import slurm_error

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Variables of the caller that the commands get. All SBATCH_*, SLURM_* and SQUEUE_* but the first two would
#: act as options.
_PASSED = ("SLURM_CONF", "SLURM_JWT", "PATH", "HOME", "TZ", "LD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class SlurmCommands:
    """A way to run Slurm's commands.

    Attributes:
        timeout_s: How long one command may take. Slurm's own MessageTimeout ends a hanging one earlier.
    """

    timeout_s: float = 60.0

    def run(self, action: str, arguments: Sequence[str], stdin: str = "", environment: bytes = b"") -> str:
        """Run one command and return its output.

        Args:
            action: What it is for, such as "hold job 12"; part of the message when it fails.
            arguments: The command's name and its arguments.
            stdin: Text for its standard input.
            environment: When not empty, the job's environment for sbatch, NAME=value ended by NUL each; sbatch
                reads it from a file in memory.

        Raises:
            GatewayUnavailableError: There is no such command.
            SlurmUnreachableError: slurmctld does not answer, or not in time.
            NoSuchJobError: slurmctld does not know the job.
            GatewayError: Slurm refused.
        """
        with _memory_file(environment) as descriptors:
            # Slurm 26.05 reads the file only together with ALL; neither version then adds the caller's variables.
            options = [part for fd in descriptors for part in ("--export=ALL", f"--export-file={fd}")]
            try:
                done = subprocess.run(
                    [arguments[0], *options, *arguments[1:]],
                    input=stdin.encode("utf-8", "surrogateescape"),
                    capture_output=True,
                    check=False,
                    timeout=self.timeout_s,
                    env=command_environment(),
                    pass_fds=descriptors,
                )
            except FileNotFoundError as err:
                raise GatewayUnavailableError(
                    f"cannot {action}: the command {arguments[0]!r} is not in PATH. Install Slurm's client commands"
                ) from err
            except subprocess.TimeoutExpired as err:
                raise SlurmUnreachableError(
                    f"cannot {action}: `{arguments[0]}` did not end within {self.timeout_s:g} s; is slurmctld running?"
                ) from err
        if done.returncode != 0:
            raise slurm_error(action, done.stderr.decode("utf-8", "replace"))
        return done.stdout.decode("utf-8", "surrogateescape")


def command_environment() -> dict[str, str]:
    """Return the environment in which Slurm's commands run."""
    passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
    return passed | {"LC_ALL": "C.UTF-8"}


@contextmanager
def _memory_file(content: bytes) -> "Iterator[tuple[int, ...]]":
    if not content:
        yield ()
        return
    descriptor = os.memfd_create("environment", 0)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as stream:
            stream.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield (descriptor,)
    finally:
        os.close(descriptor)
