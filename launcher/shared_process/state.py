"""What each session has for itself in a process that several scripts share, and which session a thread belongs to."""

import ctypes
import io
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Generic, TypeVar

from muri.launcher.job import script
from muri.launcher.job.stage_clock import StageClock
from muri.launcher.protocol import AttachRequest
from muri.launcher.sessions.setup import GPU_VARIABLES

_CLONE_FS: Final = 0x200
_libc = ctypes.CDLL(None, use_errno=True)

Value = TypeVar("Value")


@dataclass(eq=False)
class SessionState:
    """The state that a plain Python process would have for itself."""

    member: str
    environment: dict[bytes, bytes]  # as `os.environ` keeps it
    argv: list[str]
    path: list[str]
    files: tuple[int, int, int]  # descriptors of standard input, output, error
    streams: dict[str, io.TextIOWrapper]  # "stdin", "stdout", "stderr" over these files
    main: ModuleType
    shared_path: frozenset[str] = frozenset()  # entries of `path` for installed packages, which the members share
    clock: StageClock | None = None
    replaced: dict[str, Any] = field(default_factory=dict)  # streams in place of its own (`redirect_stdout`)
    exit_functions: list[Callable[[], object]] = field(default_factory=list)  # of `atexit.register`
    threads: list[threading.Thread] = field(default_factory=list)
    interrupted: threading.Event = field(default_factory=threading.Event)  # wakes a sleeping script for a signal
    leave: Callable[[int], None] = lambda _code: None  # ends it at once, as `os._exit` a process; does not return
    refuse: Callable[[str], None] = lambda _danger: None  # gives it up, not fit for a thread; does not return
    # No signal interrupts the session's own thread while it changes what members share; calls nest. `let_through` ends
    # that, and raises what was held back.
    hold_back: Callable[[], None] = lambda: None
    let_through: Callable[[], None] = lambda: None
    belongings: dict[Any, Any] = field(default_factory=dict)  # kept by `PerSession`; dropped with the session


class PerSession(Generic[Value]):
    """A value that each session has for itself; `fresh` makes the one that it starts with."""

    def __init__(self, fresh: Callable[[], Value]) -> None:
        self._fresh = fresh

    def of(self, session: SessionState) -> Value:
        """Return the session's value."""
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

foreign_look_ups: Final[list[Callable[[], SessionState | None]]] = []
"""Functions that find the session of a thread that Python did not start."""


def current_session() -> SessionState | None:
    """The session of the calling thread, None in the runtime's own threads."""
    session = _local.session
    if session is None:
        for look_up in foreign_look_ups:
            session = look_up()
    return session


def enter_session(session: SessionState | None) -> None:
    """Make the calling thread one of the session's."""
    _local.session = session


def open_streams(files: tuple[int, int, int], *, unbuffered: bool = False) -> dict[str, io.TextIOWrapper]:
    """Return text streams over a member's standard files, as Python would open them, with or without buffers."""
    stdin, stdout, stderr = (io.FileIO(os.dup(file), mode) for file, mode in zip(files, "rww", strict=True))
    sink: Any = stdout if unbuffered else io.BufferedWriter(stdout)  # a raw file is what Python itself takes
    text = partial(io.TextIOWrapper, encoding="utf-8", errors="surrogateescape")
    streams = {
        "stdin": text(io.BufferedReader(stdin)),
        "stdout": text(sink, line_buffering=not unbuffered, write_through=unbuffered),
        "stderr": text(io.BufferedWriter(stderr), errors="backslashreplace", line_buffering=True),
    }
    for (name, stream), raw, mode in zip(streams.items(), (stdin, stdout, stderr), "rww", strict=True):
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


class StandIn:
    """Stands for an object of the process and leads to the one that `read` returns in the calling thread."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.__dict__["_read"] = read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._read(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._read(), name, value)

    def __iter__(self) -> Any:
        return iter(self._read())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is one of the object."""
        return self._read().__reduce_ex__(protocol)


def handed_on(name: str) -> Callable[..., Any]:
    """Return a special method for a class of stand-ins: that of the object."""
    return lambda own, *arguments: getattr(own._read(), name)(*arguments)


def own_or(plain: Any, objects: PerSession[Any]) -> Callable[[], Any]:
    """Return a function that returns the session's object, or the process's."""

    def read() -> Any:
        session = current_session()
        return plain if session is None else objects.of(session)

    return read


def session_value(name: str, values_of: Callable[[SessionState], dict[str, Any]]) -> property:
    """Return a property that a session may set for itself; until then it reads the process's value."""

    def get(owner: Any) -> Any:
        session = current_session()
        if session is not None and name in (own := values_of(session)):
            return own[name]
        return owner.__dict__[name]

    def put(owner: Any, value: Any) -> None:
        session = current_session()
        if session is None:
            owner.__dict__[name] = value
        else:
            values_of(session)[name] = value

    return property(get, put)


def by_session(plain: Callable[..., Any], objects: PerSession[Any]) -> Callable[..., Any]:
    """Return a function that calls a method of the session's object in place of the process's bound method."""
    name = plain.__name__
    return in_session(plain)(lambda session, *args, **kwargs: getattr(objects.of(session), name)(*args, **kwargs))


def in_session(plain: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a session's substitute for a function; it takes the session first. Other threads call the plain one."""

    def decorate(substitute: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            session = current_session()
            return plain(*args, **kwargs) if session is None else substitute(session, *args, **kwargs)

        return update_wrapper(call, plain)

    return decorate


def build_state(request: AttachRequest, files: tuple[int, int, int], base_path: list[str]) -> SessionState:
    """Return the state of a session before its script is loaded; `base_path` is sys.path without a script."""
    environment = {os.fsencode(name): os.fsencode(value) for name, value in request.environment.items()}
    for name in map(os.fsencode, GPU_VARIABLES):
        environment.pop(name, None)
        if name in os.environb:
            environment[name] = os.environb[name]
    own = script.own_directories(request.target, request.module, request.cwd, request.environment.get("PYTHONPATH", ""))
    shared = [entry for entry in base_path if entry not in own]
    return SessionState(
        member=request.job_id,
        environment=environment,
        argv=[request.target, *request.arguments],
        path=[*own, *shared],
        shared_path=frozenset(shared),
        files=files,
        streams=open_streams(files, unbuffered=bool(request.environment.get("PYTHONUNBUFFERED"))),
        main=ModuleType("__main__"),
    )


def own_working_directory(request: AttachRequest, state: SessionState) -> None:
    """Give this thread, and those it starts, a working directory and umask of their own."""
    if _libc.unshare(_CLONE_FS) != 0:
        reason = os.strerror(ctypes.get_errno())
        print(
            f"muri: the working directory is shared with the other members of the group ({reason}); use absolute paths",
            file=state.streams["stderr"],
        )
        return
    os.umask(request.umask)
    os.chdir(Path(request.cwd))
