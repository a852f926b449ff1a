"""Gives each session its own arguments, search path, `__main__`, environment variables, settings, logging and warnings.

The settings are the temporary directory and the garbage collector; a session that sets hooks for errors is given up.
Each session has its own root logger, loggers, handlers and filters. A logger with the name of an installed package
belongs to the package, which all members share: they share its level and its own handlers, but records that it passes
on to the root logger go to the handlers of the session that logs.

The interpreter reads the filters of warnings from the module's attributes, but the module's own functions read them
from its dictionary. So the attributes are properties, and the dictionary holds stand-ins.
"""

import gc
import logging
import os
import sys
import tempfile
import threading
import warnings
import weakref
from types import ModuleType
from typing import Any

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
from muri.launcher.shared_process.threads_and_processes import at_session_start, of_the_process


class MainProxy(ModuleType):
    """Stands for `__main__` and leads to the session's own, so that pickling finds its classes."""

    def __getattribute__(self, name: str) -> Any:
        session = current_session()
        return super().__getattribute__(name) if session is None else getattr(session.main, name)

    def __setattr__(self, name: str, value: Any) -> None:
        session = current_session()
        if session is None:
            super().__setattr__(name, value)
        else:
            setattr(session.main, name, value)


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


def _install_collector() -> None:
    """Keep the collector running: a member that turns it off must not let the others' memory grow."""
    values: PerSession[dict[str, bool]] = PerSession(lambda: {"enabled": True})
    gc.enable = in_session(gc.enable)(lambda session: values.of(session).update(enabled=True))
    gc.disable = in_session(gc.disable)(lambda session: values.of(session).update(enabled=False))
    gc.isenabled = in_session(gc.isenabled)(lambda session: values.of(session)["enabled"])
    gc.freeze = in_session(gc.freeze)(lambda _session: None)
    gc.set_threshold = in_session(gc.set_threshold)(lambda _session, *_thresholds: None)


def install_settings() -> None:
    """Patch the modules that hold these settings."""
    for module, name in ((sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook")):
        add_properties(module, {name: of_the_process(name, f"{module.__name__}.{name}")})
    _install_temporary_directory()
    _install_collector()


_roots: PerSession[dict[str, Any]] = PerSession(
    lambda: {"handlers": [], "filters": [], "level": logging.WARNING, "disabled": False}
)
_managers: PerSession[logging.Manager] = PerSession(lambda: logging.Manager(logging.root))
_lists: PerSession[list[Any]] = PerSession(list)
_names: PerSession["weakref.WeakValueDictionary[str, logging.Handler]"] = PerSession(weakref.WeakValueDictionary)


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
    """Give each session its own root logger, loggers and handlers; `modules` tells its modules."""
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
    logging.Manager._disable = of_the_process("_disable", "logging.disable")  # type: ignore[attr-defined]
    plain_list, plain_names = logging._handlerList, logging._handlers  # type: ignore[attr-defined]
    handlers = _HandlerList(own_or(plain_list, _lists))
    logging._handlerList = handlers  # type: ignore[attr-defined]
    logging.shutdown.__defaults__ = (handlers,)
    logging._handlers = _Container(own_or(plain_names, _names))  # type: ignore[attr-defined]


def _showwarnmsg(msg: Any) -> None:
    """Show a warning by the session's hook; the plain function reads the hook from the module's dictionary."""
    if warnings.showwarning is not warnings._showwarning_orig:  # type: ignore[attr-defined]
        warnings.showwarning(msg.message, msg.category, msg.filename, msg.lineno, msg.file, msg.line)
    else:
        warnings._showwarnmsg_impl(msg)  # type: ignore[attr-defined]


def install_warnings() -> None:
    """Give `warnings` attributes that are the session's."""
    if not hasattr(warnings, "_showwarning_orig") or not isinstance(warnings.filters, list):
        return  # this Python keeps them elsewhere, per thread or context
    values: PerSession[dict[str, Any]] = PerSession(dict)
    properties = {name: session_value(name, values.of) for name in ("showwarning", "_showwarnmsg_impl")}
    properties["formatwarning"] = of_the_process("formatwarning", "warnings.formatwarning")
    plain = {name: vars(warnings)[name] for name in ("filters", "onceregistry")}
    # Each session starts with a copy of what the process started with.
    tables = own_or(dict(plain), PerSession(lambda: {name: table.copy() for name, table in plain.items()}))

    def keep_apart(name: str) -> None:
        properties[name] = property(lambda _: tables()[name], lambda _, value: tables().update({name: value}))
        vars(warnings)[name] = _Container(lambda: tables()[name])

    for name in plain:
        keep_apart(name)
    vars(warnings)["_showwarnmsg"] = _showwarnmsg
    add_properties(warnings, properties)
    # Show a warning to this member, too, if an earlier one was shown it once.
    at_session_start(lambda _session: warnings._filters_mutated())  # type: ignore[attr-defined]
