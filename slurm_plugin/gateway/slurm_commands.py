"""Runs Slurm's commands: their environment, their time limit, and what their failures mean."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from muri.slurm_plugin.gateway.base import GatewayUnavailableError, SlurmUnreachableError, slurm_error

_PASSED: Final = ("SLURM_CONF", "SLURM_JWT", "PATH", "HOME", "TZ", "LD_LIBRARY_PATH")
"""Variables of the caller that the commands get. All SBATCH_*, SLURM_* and SQUEUE_* but these would act as options."""

_PLAIN: Final = {"LC_ALL": "C.UTF-8", "SLURM_TIME_FORMAT": "%s"}
"""Times are printed as seconds since the epoch: local times repeat themselves for an hour each autumn."""


@dataclass(frozen=True, slots=True)
class SlurmCommands:
    """A way to run Slurm's commands.

    Attributes:
        timeout_s: How long one command may take. Slurm's own MessageTimeout ends a hanging one earlier.
    """

    timeout_s: float = 60.0

    def run(self, action: str, arguments: Sequence[str]) -> str:
        """Run one command and return its output.

        Args:
            action: What it is for, such as "hold job 12"; part of the message when it fails.
            arguments: The command's name and its arguments.

        Raises:
            GatewayUnavailableError: There is no such command.
            SlurmUnreachableError: slurmctld does not answer, or not in time.
            NoSuchJobError: slurmctld does not know the job.
            GatewayError: Slurm refused.
        """
        try:
            done = subprocess.run(
                [arguments[0], *map(encoded, arguments[1:])],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=self.timeout_s,
                env=command_environment(),
            )
        except FileNotFoundError as err:
            raise no_such_command(action, arguments[0]) from err
        except subprocess.TimeoutExpired as err:
            raise SlurmUnreachableError(
                f"cannot {action}: `{arguments[0]}` did not end within {self.timeout_s:g} s; is slurmctld running?"
            ) from err
        if done.returncode != 0:
            raise slurm_error(action, decoded(done.stderr))
        return decoded(done.stdout)


def no_such_command(action: str, command: str) -> GatewayUnavailableError:
    """Return the error that says which command is missing and what to install."""
    package = "util-linux" if command == "setpriv" else "Slurm's client commands"
    return GatewayUnavailableError(f"cannot {action}: the command {command!r} is not in PATH. Install {package}")


def command_environment() -> dict[str, str]:
    """Return the environment in which Slurm's commands run."""
    return {name: os.environ[name] for name in _PASSED if name in os.environ} | _PLAIN


def encoded(text: str) -> bytes:
    """Return the bytes that `decoded` read a text from, whatever the locale is."""
    return text.encode("utf-8", "surrogateescape")


def decoded(output: bytes) -> str:
    """Return a text that holds every byte of what Slurm printed: users write theirs in any encoding."""
    return output.decode("utf-8", "surrogateescape")
