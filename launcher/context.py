"""Which session a thread of the runtime belongs to, and what that session has of its own."""

import io
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Generic, TypeVar

from muri.launcher.clock import StageClock

SignalHandler = Callable[[int, Any], Any] | int | None


@dataclass(eq=False)
class SessionState:
    """What a plain Python process would have for itself.

    Attributes:
        member: The member's job id.
        environment: Its environment, as bytes, the way `os.environ` keeps it.
        argv: Its sys.argv.
        path: Its sys.path.
        own_paths: How many entries at its start are the member's own directories.
        files: Its standard file descriptors: input, output, error.
        streams: Text streams "stdin", "stdout", "stderr" over these files.
        replaced: Streams that the script has put in place of its own (`redirect_stdout`).
        main: Its module `__main__`.
        handlers: Signal handlers it has set.
        exit_functions: What it gave to `atexit.register`.
        threads: Threads it started.
        interrupted: Set when a signal is about to end it; wakes a sleeping script.
        clock: Its stage clock.
        deliver: Sends a signal to the session.
        leave: Ends the session at once, as `os._exit` ends a process; does not return.
        belongings: What others keep for it, by `PerSession`; dropped with it.
    """

    member: str
    environment: dict[bytes, bytes]
    argv: list[str]
    path: list[str]
    files: tuple[int, int, int]
    streams: dict[str, io.TextIOWrapper]
    main: ModuleType
    own_paths: int = 0
    clock: StageClock | None = None
    replaced: dict[str, Any] = field(default_factory=dict)
    handlers: dict[int, SignalHandler] = field(default_factory=dict)
    exit_functions: list[Callable[[], object]] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    interrupted: threading.Event = field(default_factory=threading.Event)
    deliver: Callable[[int], None] = lambda _signum: None
    leave: Callable[[int], None] = lambda _code: None
    belongings: dict[Any, Any] = field(default_factory=dict)


Value = TypeVar("Value")


class PerSession(Generic[Value]):
    """A value that each session has for itself.

    Args:
        fresh: Makes the value that a session starts with.
    """

    def __init__(self, fresh: Callable[[], Value]) -> None:
        self._fresh = fresh

    def of(self, session: SessionState) -> Value:
        """The session's value."""
        try:
            value: Value = session.belongings[self]
        except KeyError:
            value = session.belongings.setdefault(self, self._fresh())
        return value

    def put(self, session: SessionState, value: Value) -> None:
        """Replace the session's value."""
        session.belongings[self] = value


class _Local(threading.local):
    session: SessionState | None = None


_local = _Local()
_foreign_look_ups: list[Callable[[], SessionState | None]] = []


def current_session() -> SessionState | None:
    """The session of the calling thread, None in the runtime's own threads."""
    session = _local.session
    if session is None:
        for look_up in _foreign_look_ups:
            session = look_up()
    return session


def look_up_foreign_threads(look_up: Callable[[], SessionState | None]) -> None:
    """Say how to find the session of a thread that Python did not start."""
    _foreign_look_ups.append(look_up)


def enter_session(session: SessionState | None) -> None:
    """Make the calling thread one of the session's."""
    _local.session = session


def open_streams(files: tuple[int, int, int], *, unbuffered: bool = False) -> dict[str, io.TextIOWrapper]:
    """Text streams over a member's standard files, line by line, as Python would open them.

    Args:
        files: Standard input, output and error.
        unbuffered: Whether what is written leaves at once, as with $PYTHONUNBUFFERED.
    """
    stdin, stdout, stderr = (io.FileIO(os.dup(file), mode) for file, mode in zip(files, "rww", strict=True))
    sink: Any = stdout if unbuffered else io.BufferedWriter(stdout)  # a raw file is what Python itself takes
    streams: dict[str, io.TextIOWrapper] = {
        "stdin": io.TextIOWrapper(io.BufferedReader(stdin), encoding="utf-8", errors="surrogateescape"),
        "stdout": io.TextIOWrapper(
            sink,
            encoding="utf-8",
            errors="surrogateescape",
            line_buffering=not unbuffered,
            write_through=unbuffered,
        ),
        "stderr": io.TextIOWrapper(
            io.BufferedWriter(stderr), encoding="utf-8", errors="backslashreplace", line_buffering=True
        ),
    }
    for (name, stream), raw, mode in zip(streams.items(), (stdin, stdout, stderr), "rww", strict=True):
        raw.name, stream.mode = f"<{name}>", mode  # type: ignore[misc]
    return streams
