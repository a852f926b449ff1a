"""Gives each session its own arguments, search path, `__main__`, environment variables, settings, logging and warnings.

The settings are hooks for errors, the temporary directory, the sockets' timeout, the garbage collector, the recursion
limit and the start method of multiprocessing. Each session has its own root logger, loggers, handlers and filters. A
logger with the name of an installed package belongs to the package, which all members share: they share its level and
its own handlers, but records that it passes on to the root logger go to the handlers of the session that logs.

The interpreter reads the filters of warnings from the module's attributes, but the module's own functions read them
from its dictionary. So the attributes are properties, and the dictionary holds stand-ins.
"""

import gc
import logging
import os
import socket
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Final

from muri.launcher.job.script import after_import
from muri.launcher.shared_process.local_imports import LocalModules
from muri.launcher.shared_process.state import (
    PerSession,
    SessionState,
    StandIn,
    add_properties,
    current_session,
    handed_on,
    in_session,
    own_or,
    session_value,
)
from muri.launcher.shared_process.threads_and_processes import at_session_start


class MainProxy(ModuleType):
    """Stands for `__main__` and leads to the session's own, so that pickling finds its classes."""

    def __getattribute__(self, name: str) -> Any:
        session = current_session()
        if session is None:
            return super().__getattribute__(name)
        return getattr(session.main, name)

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


class SessionEnviron(os._Environ):  # type: ignore[type-arg] # it is generic in the stubs only
    """`os.environ` with the session's content."""

    @property
    def _data(self) -> Any:
        session = current_session()
        return self.__dict__["_data"] if session is None else session.environment


def install_interpreter() -> None:
    """Give each session its arguments, its search path, its `__main__` and its environment."""
    add_properties(sys, {name: session_value(name, vars) for name in ("argv", "path")})
    main = MainProxy("__main__")
    ModuleType.__getattribute__(main, "__dict__").update(sys.modules["__main__"].__dict__)
    sys.modules["__main__"] = main
    for environment in (os.environ, os.environb):
        environment.__class__ = SessionEnviron
    # `os.environ` calls them, too: the environment of C code is the process's.
    os.putenv = in_session(os.putenv)(lambda _session, _name, _value, /: None)
    os.unsetenv = in_session(os.unsetenv)(lambda _session, _name, /: None)


_values: Final[PerSession[dict[str, Any]]] = PerSession(dict)


def _install_hook(module: ModuleType, name: str) -> None:
    """Call the session's hook from the module's dictionary, where the interpreter looks the hook up."""
    key, plain = f"{module.__name__}.{name}", getattr(module, name)

    def get(_module: ModuleType) -> Any:
        session = current_session()
        return plain if session is None else _values.of(session).get(key, plain)

    def put(changed: ModuleType, value: Any) -> None:
        session = current_session()
        if session is None:
            changed.__dict__[name] = value
        else:
            _values.of(session)[key] = value

    def own(*args: Any) -> Any:
        hook = get(module)
        return (plain if hook is None else hook)(*args)

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

    @in_session(plain)
    def gettempdir(session: SessionState) -> Any:
        own = directories.of(session)
        if own["tempdir"] is None:
            own["tempdir"] = tempfile._get_default_tempdir()  # type: ignore[attr-defined]
        return own["tempdir"]

    tempfile._gettempdir = gettempdir  # type: ignore[attr-defined]
    add_properties(tempfile, {"tempdir": session_value("tempdir", directories.of)})


def _install_socket_timeout() -> None:
    """Keep one member's default timeout out of the others' sockets: Python has a single one in C."""
    make = socket.socket.__init__

    @in_session(socket.setdefaulttimeout)
    def setdefaulttimeout(session: SessionState, timeout: Any, /) -> None:
        if timeout is not None and timeout < 0:
            raise ValueError("Timeout value out of range")
        _values.of(session)["socket.timeout"] = timeout

    def session_make(own: Any, *args: Any, **kwargs: Any) -> None:
        make(own, *args, **kwargs)
        session = current_session()
        timeout = None if session is None else _values.of(session).get("socket.timeout")
        if timeout is not None:
            own.settimeout(timeout)

    socket.getdefaulttimeout = in_session(socket.getdefaulttimeout)(lambda s: _values.of(s).get("socket.timeout"))
    socket.setdefaulttimeout = setdefaulttimeout
    socket.socket.__init__ = session_make  # type: ignore[method-assign, assignment]


def _install_collector() -> None:
    """Keep the collector running: a member that turns it off must not let the others' memory grow."""
    gc.enable = in_session(gc.enable)(lambda session: _values.of(session).update({"gc.enabled": True}))
    gc.disable = in_session(gc.disable)(lambda session: _values.of(session).update({"gc.enabled": False}))
    gc.isenabled = in_session(gc.isenabled)(lambda session: _values.of(session).get("gc.enabled", True))
    gc.freeze = in_session(gc.freeze)(lambda _session: None)
    gc.set_threshold = in_session(gc.set_threshold)(lambda _session, *_thresholds: None)


def _install_recursion_limit() -> None:
    """Tell each member the limit that it has set, while the process's one is the largest of them."""
    plain_get, plain_set = sys.getrecursionlimit, sys.setrecursionlimit

    @in_session(plain_set)
    def setrecursionlimit(session: SessionState, limit: int, /) -> None:
        plain_set(max(limit, plain_get()) if limit > 0 else limit)  # it holds for all threads, so it only grows
        _values.of(session)["recursion"] = limit

    sys.setrecursionlimit = setrecursionlimit
    sys.getrecursionlimit = in_session(plain_get)(lambda session: _values.of(session).get("recursion", plain_get()))


def _patch_start_method(context: Any) -> None:
    """Let each member call `multiprocessing.set_start_method`, which Python allows once per process."""
    default, kept = context._default_context, PerSession[dict[str, Any]](lambda: {"_actual_context": None})
    chosen = {"_actual_context": session_value("_actual_context", kept.of)}
    default.__class__ = type("DefaultContext", (type(default),), chosen)  # a context that a script makes is its own


def install_settings() -> None:
    """Patch the modules that hold these settings."""
    for module, name in ((sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook")):
        _install_hook(module, name)
    _install_temporary_directory()
    _install_socket_timeout()
    _install_collector()
    _install_recursion_limit()
    after_import("multiprocessing.context", _patch_start_method)


_WARNING_TABLES: Final = ("filters", "onceregistry")
_WARNING_HOOKS: Final = ("showwarning", "formatwarning", "_showwarnmsg_impl")


_roots: PerSession[dict[str, Any]] = PerSession(
    lambda: {"handlers": [], "filters": [], "level": logging.WARNING, "disabled": False}
)


def _own_manager() -> logging.Manager:
    disabled = logging.Logger.manager.disable
    manager = logging.Manager(logging.root)
    manager.loggerClass = logging.Logger.manager.loggerClass
    manager.disable = disabled  # a new manager resets the level that `logging.disable` has set
    return manager


_managers: PerSession[logging.Manager] = PerSession(_own_manager)
_disabled: PerSession[dict[str, Any]] = PerSession(lambda: {"_disable": 0})
_lists: PerSession[list[Any]] = PerSession(list)
_names: PerSession["weakref.WeakValueDictionary[str, logging.Handler]"] = PerSession(weakref.WeakValueDictionary)
_captured: PerSession[list[Any]] = PerSession(list)
"""What `warnings.showwarning` was before the session gave its warnings to `logging`."""


class _Container(StandIn):
    """Stands for a list or dictionary of `logging` or `warnings`."""

    __getitem__, __setitem__, __delitem__ = map(handed_on, ("__getitem__", "__setitem__", "__delitem__"))
    __len__, __contains__ = map(handed_on, ("__len__", "__contains__"))


class _HandlerList(_Container):
    """Replaces `logging._handlerList`: each session sees its own handlers."""

    def append(self, reference: Any) -> None:
        own, session = self._read(), current_session()
        if session is not None and not own:  # Python shuts logging down at its exit; a session does so at its own
            session.exit_functions.insert(0, logging.shutdown)
        own.append(reference)


def install_logging(modules: LocalModules) -> None:
    """Give each session its own root logger, loggers, handlers and disabled level; `modules` tells its modules."""
    properties = {name: session_value(name, _roots.of) for name in ("handlers", "filters", "level", "disabled")}
    logging.root.__class__ = type("SessionRootLogger", (logging.RootLogger,), properties)
    plain_get, plain_enabled = logging.Manager.getLogger, logging.Logger.isEnabledFor

    def get_logger(manager: logging.Manager, name: str) -> logging.Logger:
        session = current_session()
        if session is None or manager is not logging.Logger.manager or not isinstance(name, str):
            return plain_get(manager, name)
        top = name.partition(".")[0]
        package = top in sys.modules and top != "__main__" and not modules.is_local(session, top)
        return plain_get(manager if package else _managers.of(session), name)

    def is_enabled_for(logger: logging.Logger, level: int) -> bool:
        if current_session() is None:
            return plain_enabled(logger, level)
        # Without the plain method's cache, because the root's level differs between sessions.
        return not logger.disabled and logger.manager.disable < level and level >= logger.getEffectiveLevel()

    logging.Manager.getLogger = get_logger  # type: ignore[method-assign, assignment]
    logging.Logger.isEnabledFor = is_enabled_for  # type: ignore[method-assign, assignment]
    logging.Manager._disable = session_value("_disable", _disabled.of)  # type: ignore[attr-defined]
    plain_list, plain_names = logging._handlerList, logging._handlers  # type: ignore[attr-defined]
    handlers = _HandlerList(own_or(plain_list, _lists))
    logging._handlerList = handlers  # type: ignore[attr-defined]
    logging.shutdown.__defaults__ = (handlers,)
    logging._handlers = _Container(own_or(plain_names, _names))  # type: ignore[attr-defined]

    @in_session(logging.captureWarnings)
    def capture_warnings(session: SessionState, capture: bool) -> None:
        saved = _captured.of(session)
        if capture and not saved:
            saved.append(warnings.showwarning)
            warnings.showwarning = logging._showwarning  # type: ignore[attr-defined]
        elif not capture and saved:
            warnings.showwarning = saved.pop()

    logging.captureWarnings = capture_warnings


def _property(name: str, plain: Any, values: PerSession[dict[str, Any]]) -> property:
    """Each session starts with a copy of what the process started with."""
    state = {"value": plain}

    def get(_module: Any) -> Any:
        session = current_session()
        if session is None:
            return state["value"]
        own = values.of(session)
        if name not in own:
            own[name] = plain.copy()
        return own[name]

    def put(_module: Any, value: Any) -> None:
        session = current_session()
        if session is None:
            state["value"] = value
        else:
            values.of(session)[name] = value

    return property(get, put)


def _showwarnmsg(msg: Any) -> None:
    """Show a warning by the session's hook; the plain function reads the hook from the module's dictionary."""
    if warnings.showwarning is not warnings._showwarning_orig:  # type: ignore[attr-defined]
        warnings.showwarning(msg.message, msg.category, msg.filename, msg.lineno, msg.file, msg.line)
    else:
        warnings._showwarnmsg_impl(msg)  # type: ignore[attr-defined]


def _formatwarnmsg(msg: Any) -> str:
    """Format a warning by the session's hook, for the same reason."""
    if warnings.formatwarning is not warnings._formatwarning_orig:  # type: ignore[attr-defined]
        return warnings.formatwarning(msg.message, msg.category, msg.filename, msg.lineno, msg.line)
    text: str = warnings._formatwarnmsg_impl(msg)  # type: ignore[attr-defined]
    return text


def install_warnings() -> None:
    """Give `warnings` attributes that are the session's."""
    if not hasattr(warnings, "_showwarning_orig") or not isinstance(warnings.filters, list):
        return  # this Python keeps them elsewhere, per thread or context
    values: PerSession[dict[str, Any]] = PerSession(dict)
    properties = {name: session_value(name, values.of) for name in _WARNING_HOOKS}
    for name in _WARNING_TABLES:
        made = properties[name] = _property(name, vars(warnings)[name], values)
        vars(warnings)[name] = _Container(partial(made.fget, warnings))  # type: ignore[arg-type, misc]
    vars(warnings).update(_showwarnmsg=_showwarnmsg, _formatwarnmsg=_formatwarnmsg)
    add_properties(warnings, properties)
    # Show a warning to this member, too, if an earlier one was shown it once.
    at_session_start(lambda _session: warnings._filters_mutated())  # type: ignore[attr-defined]
