"""What belongs to a script's interpreter: sys.argv, sys.path and the module `__main__`."""

import sys
from types import ModuleType
from typing import Any

from muri.launcher.context import current_session
from muri.launcher.isolation.module_properties import add_properties


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


def install_interpreter() -> None:
    """Give each session its arguments, its search path and its `__main__`."""
    add_properties(sys, {"argv": _list_property("argv"), "path": _list_property("path")})
    main = MainProxy("__main__")
    ModuleType.__getattribute__(main, "__dict__").update(sys.modules["__main__"].__dict__)
    sys.modules["__main__"] = main
