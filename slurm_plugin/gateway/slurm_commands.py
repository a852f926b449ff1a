"""Runs Slurm's commands: their environment, their time limit, and what their failures mean."""

import errno
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from muri.slurm_plugin.gateway.base import (
    CommandTimeoutError,
    GatewayError,
    GatewayUnavailableError,
    SlurmUnreachableError,
    TooLongAnswerError,
    slurm_error,
)
from muri.slurm_plugin.gateway.call_kinds import Calls, kind_of
from muri.slurm_plugin.gateway.command_output import Collected, LinesWith, TooMuchOutputError, run_taking

_PASSED: Final = ("SLURM_CONF", "SLURM_JWT", "PATH", "HOME", "TZ", "LD_LIBRARY_PATH")
"""Variables of the caller that the commands get. All SBATCH_*, SLURM_* and SQUEUE_* but these would act as options."""

_PLAIN: Final = {"LC_ALL": "C.UTF-8", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
"""Times are printed as seconds since the epoch: local times repeat themselves for an hour each autumn. Lists of a job
array's waiting tasks are printed in full."""


@dataclass(frozen=True, slots=True)
class SlurmCommands:
    """A way to run Slurm's commands.

    Attributes:
        timeout_s: How long one command may take. Slurm's own MessageTimeout ends a hanging one earlier.
        calls: How often Slurm was asked, by kind.
    """

    timeout_s: float = 60.0
    calls: Calls = field(default_factory=Counter)

    def run(self, action: str, arguments: Sequence[str]) -> str:
        """Run one command and return its output.

        Args:
            action: What it is for, such as "hold job 12"; part of the message when it fails.
            arguments: The command's name and its arguments.

        Raises:
            GatewayUnavailableError: There is no such command.
            SlurmUnreachableError: slurmctld does not answer, or not in time, or no process can be started.
            NoSuchJobError: slurmctld does not know the job.
            TooLongAnswerError: The output is too long.
            GatewayError: Slurm refused.
        """
        return decoded(self.output(action, arguments))

    def output(self, action: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> bytearray:
        """Run one command and return its output byte for byte; errors are those of `run`.

        Args:
            action: What it is for.
            arguments: The command's name and its arguments, which every user of this machine can see.
            variables: More of its environment, which nobody else can see.
        """
        collected = Collected()
        self._run(action, arguments, collected.take, variables)
        return collected.content

    def lines(self, action: str, arguments: Sequence[str], word: bytes, longest: int) -> list[bytes]:
        """Run one command and return the lines of its output that hold a word; errors are those of `run`.

        Args:
            action: What it is for.
            arguments: The command's name and its arguments.
            word: What has to be in a line.
            longest: Bytes; a longer line is dropped.
        """
        wanted = LinesWith(word, longest)
        self._run(action, arguments, wanted.take)
        return wanted.lines()

    def _run(
        self,
        action: str,
        arguments: Sequence[str],
        take: Callable[[bytes], None],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        name, environment = arguments[0], command_environment() | dict(variables or {})
        if kind := kind_of(arguments):
            self.calls[kind] += 1
        try:
            code, errors = run_taking([*map(encoded, arguments)], environment, self.timeout_s, take)
        except TimeoutError as err:
            raise CommandTimeoutError(
                f"cannot {action}: `{name}` did not end within {self.timeout_s:g} s; is slurmctld running?"
            ) from err
        except OSError as err:
            raise not_started(action, name, err) from err
        except TooMuchOutputError as err:
            raise TooLongAnswerError(f"cannot {action}: `{name}` printed {err}") from err
        if code < 0:  # Slurm has refused nothing: whether the call was made, the next cycle sees
            raise SlurmUnreachableError(f"cannot {action}: `{name}` was ended by signal {-code}")
        if code != 0:
            raise slurm_error(action, decoded(errors))


def not_started(action: str, command: str, error: OSError) -> GatewayError:
    """Return the error that says why no process could be started.

    That no process or memory is left is nobody's job's fault, so it ends the cycle as an unreachable slurmctld does.
    """
    if isinstance(error, FileNotFoundError):
        return GatewayUnavailableError(
            f"cannot {action}: the command {command!r} is not in PATH: this needs a host of the cluster, with Slurm's "
            "commands and util-linux"
        )
    text = f"cannot {action}: `{command}` cannot be started: {error.strerror or error}"
    return GatewayError(text) if error.errno == errno.E2BIG else SlurmUnreachableError(text)


def command_environment() -> dict[str, str]:
    """Return the environment in which Slurm's commands run."""
    return {name: os.environ[name] for name in _PASSED if name in os.environ} | _PLAIN


def encoded(text: str) -> bytes:
    """Return the bytes that `decoded` read a text from, whatever the locale is."""
    return text.encode("utf-8", "surrogateescape")


def decoded(output: bytes | bytearray) -> str:
    """Return a text that holds every byte of what Slurm printed: users write theirs in any encoding."""
    return output.decode("utf-8", "surrogateescape")
