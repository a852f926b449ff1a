"""`warnings`: each session has its own filters, its own once-registry and its own `showwarning`.

The interpreter reads these from the module's attributes, the module's own functions from its dictionary: the
dictionary holds stand-ins.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from muri.launcher.context import PerSession, SessionState, current_session
from muri.launcher.isolation.module_properties import add_properties, session_value
from muri.launcher.isolation.threads import at_session_start

_WARNING_TABLES: Final = ("filters", "onceregistry")
_WARNING_HOOKS: Final = ("showwarning", "formatwarning", "_showwarnmsg_impl")


class _StandIn:
    """A list or dictionary of `warnings` that is the session's own."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def __getattr__(self, name: str) -> Any:
        """As the session's has it."""
        return getattr(self._read(), name)

    def __getitem__(self, key: Any) -> Any:
        """An item of the session's."""
        return self._read()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set an item of the session's."""
        self._read()[key] = value

    def __delitem__(self, key: Any) -> None:
        """Delete an item of the session's."""
        del self._read()[key]

    def __iter__(self) -> Any:
        """Over the session's."""
        return iter(self._read())

    def __len__(self) -> int:
        """Of the session's."""
        return len(self._read())

    def __contains__(self, item: object) -> bool:
        """Whether the session's has it."""
        return item in self._read()


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
    """Show a warning by the session's hook, as the function of this name does."""
    if warnings.showwarning is not warnings._showwarning_orig:  # type: ignore[attr-defined]
        warnings.showwarning(msg.message, msg.category, msg.filename, msg.lineno, msg.file, msg.line)
    else:
        warnings._showwarnmsg_impl(msg)  # type: ignore[attr-defined]


def _formatwarnmsg(msg: Any) -> str:
    """Format a warning by the session's hook, as the function of this name does."""
    if warnings.formatwarning is not warnings._formatwarning_orig:  # type: ignore[attr-defined]
        return warnings.formatwarning(msg.message, msg.category, msg.filename, msg.lineno, msg.line)
    text: str = warnings._formatwarnmsg_impl(msg)  # type: ignore[attr-defined]
    return text


def show_again(_session: SessionState) -> None:
    """A warning that an earlier member was shown once is shown to this one, too."""
    warnings._filters_mutated()  # type: ignore[attr-defined]


def install_warnings() -> None:
    """Give `warnings` attributes that are the session's."""
    if not hasattr(warnings, "_showwarning_orig") or not isinstance(warnings.filters, list):
        return  # a Python that keeps them elsewhere, per thread or context
    values: PerSession[dict[str, Any]] = PerSession(dict)
    properties = {name: session_value(name, values) for name in _WARNING_HOOKS}
    for name in _WARNING_TABLES:
        made = properties[name] = _property(name, vars(warnings)[name], values)
        vars(warnings)[name] = _StandIn(partial(made.fget, warnings))  # type: ignore[arg-type, misc]
    vars(warnings).update(_showwarnmsg=_showwarnmsg, _formatwarnmsg=_formatwarnmsg)
    add_properties(warnings, properties)
    at_session_start(show_again)
