"""`logging`: each session has its own root configuration and its own loggers.

A logger whose name is that of an installed package belongs to the package, which all members share: its level and
its own handlers are shared, but what it hands on to the root logger goes to the handlers of the session that logs.
"""

import logging
import sys
from typing import Any

from muri.launcher.context import PerSession, current_session
from muri.launcher.isolation.local_modules import LocalModules
from muri.launcher.isolation.module_properties import session_value


def _fresh_root() -> dict[str, Any]:
    return {"handlers": [], "filters": [], "level": logging.WARNING, "disabled": False}


_roots: PerSession[dict[str, Any]] = PerSession(_fresh_root)


def _own_manager() -> logging.Manager:
    manager = logging.Manager(logging.root)
    manager.loggerClass = logging.Logger.manager.loggerClass
    return manager


_managers: PerSession[logging.Manager] = PerSession(_own_manager)
_disabled: PerSession[dict[str, int]] = PerSession(dict)


def _disable_property() -> property:
    def get(manager: logging.Manager) -> int:
        session = current_session()
        own = manager.__dict__.get("_disable", 0)
        return int(own if session is None else _disabled.of(session).get("level", 0))

    def put(manager: logging.Manager, value: Any) -> None:
        session = current_session()
        level = logging._checkLevel(value)  # type: ignore[attr-defined]
        if session is None:
            manager.__dict__["_disable"] = level
        else:
            _disabled.of(session)["level"] = level

    return property(get, put)


def _is_enabled_for(logger: logging.Logger, level: int) -> bool:
    """Without the cache of the plain method: the root's level differs between sessions."""
    return not logger.disabled and logger.manager.disable < level and level >= logger.getEffectiveLevel()


def _patch_loggers(modules: LocalModules) -> None:
    plain_get, plain_enabled = logging.Manager.getLogger, logging.Logger.isEnabledFor

    def get_logger(manager: logging.Manager, name: str) -> logging.Logger:
        session = current_session()
        if session is None or manager is not logging.Logger.manager or not isinstance(name, str):
            return plain_get(manager, name)
        top = name.partition(".")[0]
        package = top in sys.modules and top != "__main__" and not modules.is_local(session, top)
        return plain_get(manager if package else _managers.of(session), name)

    def is_enabled_for(logger: logging.Logger, level: int) -> bool:
        return (plain_enabled if current_session() is None else _is_enabled_for)(logger, level)

    logging.Manager.getLogger = get_logger  # type: ignore[method-assign, assignment]
    logging.Logger.isEnabledFor = is_enabled_for  # type: ignore[method-assign, assignment]
    logging.Manager.disable = _disable_property()  # type: ignore[assignment]


def install_log_configuration(modules: LocalModules) -> None:
    """Patch `logging`.

    Args:
        modules: Tells a script's own modules from installed ones.
    """
    properties = {name: session_value(name, _roots) for name in _fresh_root()}
    logging.root.__class__ = type("SessionRootLogger", (logging.RootLogger,), properties)
    _patch_loggers(modules)
