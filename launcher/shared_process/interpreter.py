"""Gives each session its own arguments, search path, `__main__`, environment variables and settings.

The settings are hooks for errors, the temporary directory, the sockets' timeout, the garbage collector, the recursion
limit and the start method of multiprocessing.
"""

import gc
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from muri.launcher.job.import_hooks import after_import
from muri.launcher.shared_process.state import PerSession, add_properties, current_session, session_value


class MainProxy(ModuleType):
    """Stands for `__main__` and leads to the session's own, so that pickling finds its classes."""

    def __getattribute__(self, name: str) -> Any:
        session = current_session()
        if session is None:
            return super().__getattribute__(name)
        return session.main.__dict__ if name == "__dict__" else getattr(session.main, name)

    def __setattr__(self, name: str, value: Any) -> None:
        session = current_session()
        if session is None:
            super().__setattr__(name, value)
        else:
            setattr(session.main, name, value)

    def __delattr__(self, name: str) -> None:
        session = current_session()
        if session is None:
            super().__delattr__(name)
        else:
            delattr(session.main, name)


def _list_property(name: str) -> property:
    """A property of `sys`: the session's field, or the process's value outside of sessions."""

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


def install_interpreter() -> None:
    """Give each session its arguments, its search path and its `__main__`."""
    add_properties(sys, {"argv": _list_property("argv"), "path": _list_property("path")})
    main = MainProxy("__main__")
    ModuleType.__getattribute__(main, "__dict__").update(sys.modules["__main__"].__dict__)
    sys.modules["__main__"] = main


class SessionEnviron(os._Environ):  # type: ignore[type-arg] # it is generic in the stubs only
    """`os.environ` with the session's content; it never touches the process's C environment."""

    @property
    def _data(self) -> Any:
        session = current_session()
        return self.__dict__["_data"] if session is None else session.environment

    def __setitem__(self, key: Any, value: Any) -> None:
        if current_session() is None:
            super().__setitem__(key, value)
        else:
            self._data[self.encodekey(key)] = self.encodevalue(value)

    def __delitem__(self, key: Any) -> None:
        if current_session() is None:
            super().__delitem__(key)
            return
        try:
            del self._data[self.encodekey(key)]
        except KeyError:
            raise KeyError(key) from None


def install_environment() -> None:
    """Make `os.environ` and `os.environb` look into the session."""
    for environment in (os.environ, os.environb):
        environment.__class__ = SessionEnviron


_values: Final[PerSession[dict[str, Any]]] = PerSession(dict)


def _install_hooks() -> None:
    """Call the session's hook from the module's dictionary, where the interpreter looks the hook up."""
    for module, name in ((sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook")):
        _install_hook(module, name)


def _install_hook(module: ModuleType, name: str) -> None:
    key, plain = f"{module.__name__}.{name}", getattr(module, name)
    values = _values

    def own(*args: Any) -> Any:
        session = current_session()
        hook = None if session is None else values.of(session).get(key)
        return (plain if hook is None else hook)(*args)

    def get(_module: ModuleType) -> Any:
        session = current_session()
        return plain if session is None else values.of(session).get(key, plain)

    def put(changed: ModuleType, value: Any) -> None:
        session = current_session()
        if session is None:
            changed.__dict__[name] = value
        else:
            values.of(session)[key] = value

    module.__dict__[name] = own
    add_properties(module, {name: property(get, put)})


def own_excepthook() -> Callable[..., Any] | None:
    """What the session has set as `sys.excepthook`, None if nothing."""
    session = current_session()
    return None if session is None else _values.of(session).get("sys.excepthook")


def _install_temporary_directory() -> None:
    """Look for each member's own $TMPDIR; Python looks for it once per process."""
    plain = tempfile._gettempdir  # type: ignore[attr-defined]
    directories: PerSession[dict[str, Any]] = PerSession(lambda: {"tempdir": None})

    def gettempdir() -> Any:
        session = current_session()
        if session is None:
            return plain()
        own = directories.of(session)
        if own["tempdir"] is None:
            own["tempdir"] = tempfile._get_default_tempdir()  # type: ignore[attr-defined]
        return own["tempdir"]

    tempfile._gettempdir = gettempdir  # type: ignore[attr-defined]
    add_properties(tempfile, {"tempdir": session_value("tempdir", directories)})


def _install_socket_timeout() -> None:
    """Keep one member's default timeout out of the others' sockets: Python has a single one in C."""
    plain_get, plain_set, make = socket.getdefaulttimeout, socket.setdefaulttimeout, socket.socket.__init__

    def getdefaulttimeout() -> Any:
        session = current_session()
        return plain_get() if session is None else _values.of(session).get("socket.timeout")

    def setdefaulttimeout(timeout: Any, /) -> None:
        session = current_session()
        if session is None:
            plain_set(timeout)
        elif timeout is not None and timeout < 0:
            raise ValueError("Timeout value out of range")
        else:
            _values.of(session)["socket.timeout"] = timeout

    def session_make(own: Any, *args: Any, **kwargs: Any) -> None:
        make(own, *args, **kwargs)
        session = current_session()
        timeout = None if session is None else _values.of(session).get("socket.timeout")
        if timeout is not None:
            own.settimeout(timeout)

    socket.getdefaulttimeout, socket.setdefaulttimeout = getdefaulttimeout, setdefaulttimeout
    socket.socket.__init__ = session_make  # type: ignore[method-assign, assignment]


def _install_collector() -> None:
    """Keep the collector running: a member that turns it off must not let the others' memory grow."""
    plain = {name: getattr(gc, name) for name in ("enable", "disable", "isenabled", "freeze", "set_threshold")}

    def only_outside(name: str, value: bool | None) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            session = current_session()
            if session is None:
                return plain[name](*args)
            if value is not None:
                _values.of(session)["gc.enabled"] = value
            return None

        return call

    def isenabled() -> bool:
        session = current_session()
        return bool(plain["isenabled"]() if session is None else _values.of(session).get("gc.enabled", True))

    gc.enable, gc.disable, gc.isenabled = only_outside("enable", True), only_outside("disable", False), isenabled
    gc.freeze, gc.set_threshold = only_outside("freeze", None), only_outside("set_threshold", None)


def _install_recursion_limit() -> None:
    """Tell each member the limit that it has set, while the process's one is the largest of them."""
    plain_get, plain_set = sys.getrecursionlimit, sys.setrecursionlimit

    def setrecursionlimit(limit: int, /) -> None:
        session = current_session()
        if session is None or limit <= 0:
            plain_set(limit)
            return
        plain_set(max(limit, plain_get()))  # it holds for all threads, so it only grows
        _values.of(session)["recursion"] = limit

    def getrecursionlimit() -> int:
        session = current_session()
        return int(plain_get() if session is None else _values.of(session).get("recursion", plain_get()))

    sys.setrecursionlimit, sys.getrecursionlimit = setrecursionlimit, getrecursionlimit


def _patch_start_method(context: ModuleType) -> None:
    """Let each member call `multiprocessing.set_start_method`, which Python allows once per process."""
    default = context._default_context
    kept: PerSession[dict[str, Any]] = PerSession(dict)

    def get(own: Any) -> Any:
        session = current_session()
        if session is None or own is not default:
            return own.__dict__.get("_actual_context")
        return kept.of(session).get("context")

    def put(own: Any, value: Any) -> None:
        session = current_session()
        if session is None or own is not default:
            own.__dict__["_actual_context"] = value
        else:
            kept.of(session)["context"] = value

    type(default)._actual_context = property(get, put)


def install_settings() -> None:
    """Patch the modules that hold these settings."""
    _install_hooks()
    _install_temporary_directory()
    _install_socket_timeout()
    _install_collector()
    _install_recursion_limit()
    after_import("multiprocessing.context", _patch_start_method)
