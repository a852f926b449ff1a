"""Runs Slurm's commands: their environment, time limit, output, and the meaning of their failures."""

import errno
import logging
import os
import selectors
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from muri.slurm_plugin.gateway.base import (
    Calls,
    CommandTimeoutError,
    GatewayError,
    GatewayUnavailableError,
    SlurmUnreachableError,
    TooLongAnswerError,
    kind_of,
    slurm_error,
)

log = logging.getLogger(__name__)

MOST_OUTPUT: Final = 256 * 1024 * 1024
"""Bytes. The records of 10,000 ordinary jobs of Slurm 26.05 take 80 MiB; this much takes 512 MiB to read and parse."""

_MOST_ERRORS: Final = 64 * 1024
_AT_ONCE: Final = 1024 * 1024
_SHOWN_OF_DROPPED: Final = 12  # Bytes that tell which line it was; a job's begins with its id


class TooMuchOutputError(Exception):
    """A process printed more than is read."""


class Collected:
    """Takes all output, up to a limit."""

    def __init__(self) -> None:
        self.content = bytearray()

    def take(self, chunk: bytes) -> None:
        """Add a part.

        Raises:
            TooMuchOutputError: It is too much.
        """
        if len(self.content) + len(chunk) > MOST_OUTPUT:
            raise TooMuchOutputError(f"more than {MOST_OUTPUT} bytes")
        self.content += chunk


class LinesWith:
    """Takes only lines that hold a word; a line that is longer than the limit is dropped, with a warning."""

    def __init__(self, word: bytes, longest: int) -> None:
        self._found = Collected()
        self._rest = bytearray()
        self._word = word
        self._longest = longest
        self._skips = False

    def take(self, chunk: bytes) -> None:
        """Add a part.

        Raises:
            TooMuchOutputError: There are too many such lines.
        """
        first, *later = chunk.split(b"\n")
        self._add(first)
        for part in later:
            self._end_line()
            self._add(part)

    def lines(self) -> list[bytes]:
        """Return the lines, once all parts have been added."""
        self._end_line()
        return bytes(self._found.content).split(b"\n")[:-1]

    def _add(self, part: bytes) -> None:
        self._skips = self._skips or len(self._rest) + len(part) > self._longest
        self._rest += part[: max(0, _SHOWN_OF_DROPPED - len(self._rest))] if self._skips else part

    def _end_line(self) -> None:
        if self._skips:
            begin = decoded(self._rest[:_SHOWN_OF_DROPPED])
            log.warning("a line of more than %d bytes is left out, which begins with %r", self._longest, begin)
        elif self._word in self._rest:
            self._found.take(bytes(self._rest) + b"\n")
        self._rest.clear()
        self._skips = False


@contextmanager
def signals_kept_off() -> Iterator[None]:
    """Keep SIGTERM and SIGINT from each process that is started meanwhile.

    A signal that tells this process to stop is not meant for a call that is under way. A session of its own keeps a
    signal to this process group off, but begins only after the fork: the blocked signals, which a child inherits, cover
    the rest.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_taking(
    arguments: Sequence[bytes | str], environment: Mapping[str, str], timeout_s: float, take: Callable[[bytes], None]
) -> tuple[int, bytes]:
    """Run a process to its end, passing its output on in parts; one that takes too long or prints too much is killed.

    Returns:
        Its exit code, and the beginning of its stderr.

    Raises:
        OSError: It cannot be started.
        TimeoutError: It took too long.
        TooMuchOutputError: It printed too much for `take`.
    """
    end_s = time.monotonic() + timeout_s
    pipe = subprocess.PIPE
    with signals_kept_off():
        child = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
        )
    with child:
        try:
            errors = _pump(child, take, end_s)
            return child.wait(max(0.1, end_s - time.monotonic())), errors
        except subprocess.TimeoutExpired as error:
            raise TimeoutError from error
        finally:
            child.kill()  # nothing happens to one that has ended


def _pump(child: "subprocess.Popen[bytes]", take: Callable[[bytes], None], end_s: float) -> bytes:
    """Read both pipes to their ends and return the beginning of stderr."""
    errors = bytearray()
    with selectors.DefaultSelector() as selector:
        for pipe, sink in ((child.stdout, take), (child.stderr, errors.extend)):
            if pipe is not None:
                selector.register(pipe, selectors.EVENT_READ, sink)
        while selector.get_map():
            if (left_s := end_s - time.monotonic()) <= 0:
                raise TimeoutError
            for key, _ in selector.select(left_s):
                if chunk := os.read(key.fd, _AT_ONCE):
                    key.data(chunk)
                else:
                    selector.unregister(key.fileobj)
            del errors[_MOST_ERRORS:]
    return bytes(errors)


_PASSED: Final = ("SLURM_CONF", "SLURM_JWT", "PATH", "HOME", "TZ", "LD_LIBRARY_PATH")
"""Variables of the caller that the commands get. All SBATCH_*, SLURM_* and SQUEUE_* but these would act as options."""

_PLAIN: Final = {"LC_ALL": "C.UTF-8", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
"""Times are printed as seconds since the epoch: local times repeat themselves for an hour each autumn. Lists of a job
array's waiting tasks are printed in full."""


@dataclass(frozen=True, slots=True)
class SlurmCommands:
    """Runs Slurm's commands."""

    timeout_s: float = 60.0  # Of one command. Slurm's own MessageTimeout ends a hanging one earlier
    calls: Calls = field(default_factory=Counter)

    def run(self, action: str, arguments: Sequence[str]) -> str:
        """Run one command and return its output.

        Args:
            action: The purpose, such as "hold job 12"; part of the message when it fails.
            arguments: The command's name and its arguments, which every user of this machine can see.

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

        No other user can see `variables`, which are added to its environment.
        """
        collected = Collected()
        self._run(action, arguments, collected.take, variables)
        return collected.content

    def lines(
        self,
        action: str,
        arguments: Sequence[str],
        word: bytes,
        longest: int,
        variables: Mapping[str, str] | None = None,
    ) -> list[bytes]:
        """Run one command as `output` does and return its lines that hold a word; those over `longest` are dropped."""
        wanted = LinesWith(word, longest)
        self._run(action, arguments, wanted.take, variables)
        return wanted.lines()

    def _run(
        self, action: str, arguments: Sequence[str], take: Callable[[bytes], None], variables: Mapping[str, str] | None
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

    A lack of processes or memory is not a job's fault, so it ends the cycle as an unreachable slurmctld does.
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
    """Return a text that holds every byte of Slurm's output: users write theirs in any encoding."""
    return output.decode("utf-8", "surrogateescape")
