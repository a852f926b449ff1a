"""A member's session: its state, its threads, and the interface that the runtime uses."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import update_wrapper
from types import ModuleType
from typing import Any, Callable, Generic, Protocol, TypeVar, Union, runtime_checkable

from muri.launcher.job.stage_clock import StageClock

Value = TypeVar("Value")

SignalHandler = Union[Callable[[int, Any], Any], int, None]


@dataclass(eq=False)
class SessionState:
    """The state that a plain Python process would have for itself.

    Attributes:
        member: The member's job id.
        environment: Its environment, as bytes, the way `os.environ` keeps it.
        argv: Its sys.argv.
        path: Its sys.path.
        shared_path: Entries of it that name the directories of installed packages, which the members share.
        files: Its standard file descriptors: input, output, error.
        streams: Text streams "stdin", "stdout", "stderr" over these files.
        replaced: Streams that the script has put in place of its own (`redirect_stdout`).
        main: Its module `__main__`.
        handlers: Signal handlers that it has set.
        exit_functions: Functions that it gave to `atexit.register`.
        threads: Threads that it started.
        interrupted: Set when a signal is about to end it; wakes a sleeping script.
        clock: Its stage clock.
        deliver: Sends a signal to the session.
        leave: Ends the session at once, as `os._exit` ends a process; does not return.
        refuse: Gives the session up for a reason, because it cannot run in a thread; does not return.
        hold_back: From now on no signal interrupts the session's own thread, which is about to change what members
            share; calls nest.
        let_through: Ends what `hold_back` began. Raises what was held back, if it is told to.
        belongings: Values that other modules keep for it through `PerSession`; dropped with it.
    """

    member: str
    environment: dict[bytes, bytes]
    argv: list[str]
    path: list[str]
    files: tuple[int, int, int]
    streams: dict[str, io.TextIOWrapper]
    main: ModuleType
    shared_path: frozenset[str] = frozenset()
    clock: StageClock | None = None
    replaced: dict[str, Any] = field(default_factory=dict)
    handlers: dict[int, SignalHandler] = field(default_factory=dict)
    exit_functions: list[Callable[[], object]] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    interrupted: threading.Event = field(default_factory=threading.Event)
    deliver: Callable[[int], None] = lambda _signum: None
    leave: Callable[[int], None] = lambda _code: None
    refuse: Callable[[str], None] = lambda _danger: None
    hold_back: Callable[[], None] = lambda: None
    let_through: Callable[[bool], None] = lambda _now: None
    belongings: dict[Any, Any] = field(default_factory=dict)


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
    """Set the function that finds the session of a thread that Python did not start."""
    _foreign_look_ups.append(look_up)


def enter_session(session: SessionState | None) -> None:
    """Make the calling thread one of the session's."""
    _local.session = session


def open_streams(files: tuple[int, int, int], *, unbuffered: bool = False) -> dict[str, io.TextIOWrapper]:
    """Text streams over a member's standard files, line by line, as Python would open them.

    Args:
        files: Standard input, output and error.
        unbuffered: Whether text is written at once, as with $PYTHONUNBUFFERED.
    """
    stdin, stdout, stderr = (io.FileIO(os.dup(file), mode) for file, mode in zip(files, "rww"))
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
    for (name, stream), raw, mode in zip(streams.items(), (stdin, stdout, stderr), "rww"):
        raw.name, stream.mode = f"<{name}>", mode  # type: ignore[misc]
    return streams


def add_properties(module: ModuleType, properties: dict[str, property]) -> None:
    """Give one module properties; code outside it that reads `module.name` uses them.

    The module's own functions, and C code that looks into its dictionary, go on reading the dictionary.
    """
    plain = type(module)

    def new(_class: type, *arguments: Any, **keywords: Any) -> ModuleType:
        """An ordinary module: Python makes every imported module as `type(sys)(name)`."""
        return ModuleType(*arguments, **keywords)

    module.__class__ = type(plain.__name__, (plain,), {"__slots__": (), "__new__": new, **properties})


def session_value(name: str, values: PerSession[dict[str, Any]]) -> property:
    """A property that a session may set for itself; until then it reads the process's value.

    Args:
        name: The attribute's name, also its key in the values.
        values: The values that the session has set.
    """

    def get(owner: Any) -> Any:
        session = current_session()
        if session is not None and name in (own := values.of(session)):
            return own[name]
        try:
            return owner.__dict__[name]
        except KeyError:
            what = f"{type(owner).__name__} {getattr(owner, '__name__', owner)!r}"
            raise AttributeError(f"{what} has no attribute {name!r}") from None

    def put(owner: Any, value: Any) -> None:
        session = current_session()
        if session is None:
            owner.__dict__[name] = value
        else:
            values.of(session)[name] = value

    return property(get, put)


def by_session(plain: Callable[..., Any], objects: PerSession[Any]) -> Callable[..., Any]:
    """A function that replaces a bound method of the process's object by that of the session's object.

    Args:
        plain: The bound method.
        objects: The sessions' objects.
    """
    name = plain.__name__

    def call(*args: Any, **kwargs: Any) -> Any:
        session = current_session()
        return (plain if session is None else getattr(objects.of(session), name))(*args, **kwargs)

    return update_wrapper(call, plain)


@dataclass(frozen=True)
class Roots:
    """Where a member's threads and processes begin.

    Attributes:
        threads: Kernel's numbers of its threads in this process.
        process: The script's own process, 0 if it has none.
        supervisor: The process that stands between that one and this, 0 if there is none.
    """

    threads: tuple[int, ...] = ()
    process: int = 0
    supervisor: int = 0


@runtime_checkable
class MemberSession(Protocol):
    """One run of a member's script; `ThreadSession` or `ProcessSession` in `launcher.sessions`.

    Attributes:
        member: The member's job id.
        clock: Its stage times.
        exit_code: The script's exit code, None until it ended.
        stopped_at: Iteration at which the script was saved and stopped, None if it ended in another way.
        ended: Set when the script ended and everything of it was cleaned up.
        fault: What the script raised if that ended the CUDA context of this process, else None.
        lost_cause: Why the script must run again; None if it need not, or if the runtime's end is why.
        condemned: Whether its exit code means nothing because the CUDA context has ended.
        out_of_memory: Whether the script ended for lack of GPU memory.
        hung: Whether it is being ended, or was, because it hangs.
        paused: Whether it is to do nothing, because its job is suspended.
        client_pid: The process in which `muri run` waits for the end; 0 once it is gone, or if it cannot be seen.
    """

    member: str
    clock: StageClock
    exit_code: int | None
    stopped_at: int | None
    ended: threading.Event
    fault: str | None
    lost_cause: str | None
    condemned: bool
    out_of_memory: bool
    hung: bool
    paused: bool
    client_pid: int

    @property
    def isolation(self) -> str:
        """Either "thread" or "process"."""

    @property
    def checkpointed(self) -> bool:
        """Whether the script has told the runtime how to save it."""

    @property
    def lost(self) -> bool:
        """Whether the runtime's end cut the script short, so that its exit code means nothing."""

    def start(self, on_end: Callable[[MemberSession], None]) -> None:
        """Run the script; `on_end` is called once, when the exit code is known."""

    def deliver(self, signum: int) -> None:
        """Act as the signal would on a process that runs the script."""

    def end(self, signum: int, grace_s: float = ...) -> None:
        """End the script with a signal's default action, and insist on it after `grace_s` seconds."""

    def end_as_hung(self, cause: str) -> None:
        """End a script that hangs: the cause goes to its standard error, and its exit code is `HUNG_EXIT_CODE`."""

    def stop(self) -> None:
        """Stop the script's process, if it has one of its own, as SIGSTOP would."""

    def go_on(self) -> None:
        """Continue what `stop` has stopped."""

    def roots(self) -> Roots:
        """Where the threads and processes begin that work for the script."""

    def environment(self) -> Mapping[str, str]:
        """The member's environment, as it was handed over."""

    def python(self) -> Mapping[str, str]:
        """The script's Python: its "prefix" and "executable"."""

    def facts(self) -> Mapping[str, Any] | None:
        """What the script has told beside its iterations (`launcher.telemetry.script_facts`), None while it has not."""

    def shut_down(self, grace_s: float) -> None:
        """Let the script's own SIGTERM handler work, else end the script, because the runtime ends."""

    def detach_output(self) -> None:
        """Discard what the script still writes, because the member's own process is gone."""
