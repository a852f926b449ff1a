"""Gives each session its own view of what Python has once per process.

Every patch asks `current_session()` and does what it always did in the runtime's own threads.
Nothing here knows of sockets or resources. What stays shared is listed in docs/stage-api.md.
"""

import _posixsubprocess
import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Final

from muri.launcher import local_modules
from muri.launcher.context import SessionState, current_session, enter_session

_STREAM_NAMES: Final = ("stdin", "stdout", "stderr")
_ENVIRONMENT_ARGUMENT: Final = 5
_CHILD_FILE_ARGUMENTS: Final = (6, 9, 11)
"""Where `_posixsubprocess.fork_exec` takes the environment and the child's standard files."""


class SessionExit(SystemExit):
    """A script asked to end at once, without clean-up: `os._exit`."""


class StreamProxy:
    """Stands for sys.stdin, stdout or stderr and leads to the session's own stream.

    Args:
        name: Which one.
        fallback: The process's own stream.
        follow_replaced: Whether a stream that the script has put in place counts.
    """

    def __init__(self, name: str, fallback: Any, *, follow_replaced: bool) -> None:
        self.__dict__.update(_name=name, _fallback=fallback, _follow_replaced=follow_replaced)

    def _target(self) -> Any:
        session = current_session()
        if session is None:
            return self._fallback
        if self._follow_replaced and self._name in session.replaced:
            return session.replaced[self._name]
        return session.streams[self._name]

    def __getattr__(self, attribute: str) -> Any:
        """Read from the session's stream."""
        return getattr(self._target(), attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        """Write to the session's stream."""
        setattr(self._target(), attribute, value)

    def __iter__(self) -> Any:
        """Lines of the session's stream."""
        return iter(self._target())

    def __next__(self) -> Any:
        """Next line of the session's stream."""
        return next(self._target())

    def __enter__(self) -> Any:
        """As the session's stream does."""
        return self._target().__enter__()

    def __exit__(self, *exception: Any) -> Any:
        """As the session's stream does."""
        return self._target().__exit__(*exception)


class MainProxy(ModuleType):
    """Stands for `__main__` and leads to the session's own, so that pickling finds its classes."""

    def __getattribute__(self, name: str) -> Any:
        """Read from the session's module."""
        session = current_session()
        if session is None:
            return super().__getattribute__(name)
        return session.main.__dict__ if name == "__dict__" else getattr(session.main, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Write to the session's module."""
        session = current_session()
        if session is None:
            super().__setattr__(name, value)
        else:
            setattr(session.main, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete from the session's module."""
        session = current_session()
        if session is None:
            super().__delattr__(name)
        else:
            delattr(session.main, name)


class SessionEnviron(os._Environ):  # type: ignore[type-arg] # it is generic in the stubs only
    """`os.environ` whose content is the session's; the process's C environment is never touched."""

    @property
    def _data(self) -> Any:
        session = current_session()
        return self.__dict__["_data"] if session is None else session.environment

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set a variable of the session."""
        if current_session() is None:
            super().__setitem__(key, value)
        else:
            self._data[self.encodekey(key)] = self.encodevalue(value)

    def __delitem__(self, key: Any) -> None:
        """Remove a variable of the session."""
        if current_session() is None:
            super().__delitem__(key)
            return
        try:
            del self._data[self.encodekey(key)]
        except KeyError:
            raise KeyError(key) from None


def _list_property(name: str) -> property:
    """A property of `sys` that is a field of the session, or what it was."""

    def get(module: ModuleType) -> Any:
        session = current_session()
        return module.__dict__[name] if session is None else getattr(session, name)

    def put(module: ModuleType, value: Any) -> None:
        session = current_session()
        if session is None:
            module.__dict__[name] = value
        else:
            setattr(session, name, value)

    return property(get, put)


def _stream_property(name: str, own: StreamProxy) -> property:
    """A property of `sys`: the stream that the script has put in place, else its own."""

    def get(module: ModuleType) -> Any:
        session = current_session()
        return own if session is None else session.replaced.get(name, own)

    def put(module: ModuleType, value: Any) -> None:
        session = current_session()
        if session is None:
            own.__dict__["_fallback"] = value
        elif value is own:
            session.replaced.pop(name, None)
        else:
            session.replaced[name] = value

    return property(get, put)


def _install_sys() -> None:
    properties: dict[str, Any] = {"argv": _list_property("argv"), "path": _list_property("path")}
    for name in _STREAM_NAMES:
        stream = getattr(sys, name)
        own = StreamProxy(name, stream, follow_replaced=False)
        # The interpreter itself (print, input, tracebacks) reads the module's dictionary.
        sys.__dict__[name] = StreamProxy(name, stream, follow_replaced=True)
        sys.__dict__[f"__{name}__"] = own
        properties[name] = _stream_property(name, own)
    sys.__class__ = type("SessionSys", (ModuleType,), properties)
    main = MainProxy("__main__")
    ModuleType.__getattribute__(main, "__dict__").update(sys.modules["__main__"].__dict__)
    sys.modules["__main__"] = main


def _install_environment() -> None:
    for environment in (os.environ, os.environb):
        environment.__class__ = SessionEnviron


def _install_threads() -> None:
    start = threading.Thread.start

    def start_in_session(thread: threading.Thread) -> None:
        session = current_session()
        if session is not None:
            thread.run = partial(_run_in_session, session, thread.run)  # type: ignore[method-assign]
            session.threads = [other for other in session.threads if other.is_alive()] + [thread]
        start(thread)

    threading.Thread.start = start_in_session  # type: ignore[method-assign, assignment]


def _run_in_session(session: SessionState, run: Callable[[], None]) -> None:
    enter_session(session)
    run()


def _install_signals() -> None:
    set_handler, get_handler, kill = signal.signal, signal.getsignal, os.kill

    def default_of(signum: int) -> Any:
        return signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL

    def session_getsignal(signalnum: Any) -> Any:
        session = current_session()
        if session is None:
            return get_handler(signalnum)
        return session.handlers.get(int(signalnum), default_of(int(signalnum)))

    def session_signal(signalnum: Any, handler: Any) -> Any:
        session = current_session()
        if session is None:
            return set_handler(signalnum, handler)
        if not callable(handler) and handler not in {signal.SIG_DFL, signal.SIG_IGN}:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
        previous = session_getsignal(signalnum)
        session.handlers[int(signalnum)] = handler
        return previous

    def session_kill(pid: int, signalnum: int) -> None:
        session = current_session()
        if session is None or pid != os.getpid() or signalnum == 0:
            kill(pid, signalnum)
        else:
            session.deliver(int(signalnum))

    signal.signal, signal.getsignal = session_signal, session_getsignal
    os.kill = session_kill
    signal.raise_signal = lambda signalnum: os.kill(os.getpid(), signalnum)


def _install_exits(runtime_pid: int) -> None:
    register, unregister, hard_exit = atexit.register, atexit.unregister, os._exit

    def session_register(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        session = current_session()
        if session is None:
            return register(function, *args, **kwargs)
        session.exit_functions.append(partial(function, *args, **kwargs))
        return function

    def session_unregister(function: Callable[..., Any]) -> None:
        session = current_session()
        if session is None:
            unregister(function)
        else:
            kept = [f for f in session.exit_functions if not (isinstance(f, partial) and f.func == function)]
            session.exit_functions = kept

    def session_exit(status: int) -> Any:
        if current_session() is None or os.getpid() != runtime_pid:
            hard_exit(status)
        raise SessionExit(status)

    atexit.register, atexit.unregister = session_register, session_unregister
    os._exit = session_exit


def _install_sleep() -> None:
    sleep = time.sleep

    def session_sleep(seconds: float, /) -> None:
        session = current_session()
        if session is None or seconds <= 0 or session.interrupted.is_set():
            sleep(seconds)
        else:
            session.interrupted.wait(seconds)

    time.sleep = session_sleep  # type: ignore[assignment]


def _install_subprocesses() -> None:
    fork_exec = _posixsubprocess.fork_exec

    def session_fork_exec(*arguments: Any) -> int:
        session = current_session()
        if session is not None:
            changed = list(arguments)
            if changed[_ENVIRONMENT_ARGUMENT] is None:
                changed[_ENVIRONMENT_ARGUMENT] = [k + b"=" + v for k, v in session.environment.items()]
            for index, file in zip(_CHILD_FILE_ARGUMENTS, session.files, strict=True):
                if changed[index] == -1:
                    changed[index] = file
            arguments = tuple(changed)
        return fork_exec(*arguments)

    _posixsubprocess.fork_exec = session_fork_exec
    subprocess._fork_exec = session_fork_exec  # type: ignore[attr-defined]


def _reset_signals_in_child() -> None:
    if current_session() is not None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            _plain_signal(number, signal.SIG_DFL)


_plain_signal = signal.signal


_forget: list[Callable[[SessionState], None]] = []


def forget_modules(session: SessionState) -> None:
    """Drop the modules that a session imported from its own directories."""
    for function in _forget:
        function(session)


def install() -> None:
    """Patch this process; call once, from its main thread, before any session starts."""
    _install_sys()
    _install_environment()
    _install_threads()
    _install_signals()
    _install_exits(os.getpid())
    _install_sleep()
    _install_subprocesses()
    _forget.append(local_modules.install().forget)
    os.register_at_fork(after_in_child=_reset_signals_in_child)
