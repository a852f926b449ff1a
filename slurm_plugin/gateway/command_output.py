"""Runs a process and takes what it prints as it comes: users' texts decide how much that is, so it has a limit."""

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

MOST_OUTPUT: Final = 256 * 1024 * 1024
"""Bytes. The records of 10,000 ordinary jobs of Slurm 26.05 take 80 MiB; this much takes 512 MiB to read and parse."""

_MOST_ERRORS: Final = 64 * 1024

_AT_ONCE: Final = 1024 * 1024


class TooMuchOutputError(Exception):
    """A process printed more than is read."""


class Collected:
    """Takes all output, up to a limit."""

    def __init__(self, most: int = MOST_OUTPUT) -> None:
        self.content = bytearray()
        self._most = most

    def take(self, chunk: bytes) -> None:
        """Add a part.

        Raises:
            TooMuchOutputError: It is too much.
        """
        if len(self.content) + len(chunk) > self._most:
            raise TooMuchOutputError(f"more than {self._most} bytes")
        self.content += chunk


class LinesWith:
    """Takes those lines only that hold a word; a line that is longer than the limit is dropped."""

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
        self._rest += b"" if self._skips else part

    def _end_line(self) -> None:
        if not self._skips and self._word in self._rest:
            self._found.take(bytes(self._rest.rstrip(b" ")) + b"\n")
        self._rest.clear()
        self._skips = False


@contextmanager
def signals_kept_off() -> Iterator[None]:
    """Keep SIGTERM and SIGINT from each process that is started meanwhile.

    What tells this process to stop is not meant for a call that is under way. A session of its own keeps a signal to
    this process group off, but begins only after the fork: the blocked signals, which a child inherits, cover the rest.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_taking(
    arguments: Sequence[bytes | str], environment: Mapping[str, str], timeout_s: float, take: Callable[[bytes], None]
) -> tuple[int, bytes]:
    """Run a process to its end; one that takes too long or prints too much is killed.

    Args:
        arguments: The command and its arguments.
        environment: Its environment.
        timeout_s: How long it may take.
        take: Gets what it prints, in parts.

    Returns:
        Its exit code, and the beginning of what it wrote to stderr.

    Raises:
        OSError: It cannot be started.
        TimeoutError: It took too long.
        TooMuchOutputError: It printed too much for `take`.
    """
    end_s = time.monotonic() + timeout_s
    pipe = subprocess.PIPE
    with signals_kept_off():
        child = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            env=environment,
            start_new_session=True,
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
