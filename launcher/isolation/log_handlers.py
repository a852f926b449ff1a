"""`logging` keeps lists of all handlers, which `logging.shutdown` and `dictConfig` close: each session has its own."""

import logging
import warnings
import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any, Final

from muri.launcher.context import PerSession, SessionState, current_session

_lists: PerSession[list[Any]] = PerSession(list)
_names: PerSession["weakref.WeakValueDictionary[str, logging.Handler]"] = PerSession(weakref.WeakValueDictionary)
_captured: PerSession[list[Any]] = PerSession(list)
"""What `warnings.showwarning` was before the session gave its warnings to `logging`."""


class _HandlerList(list[Any]):
    """Stands for `logging._handlerList`; itself it holds the runtime's handlers."""

    def _own(self) -> list[Any] | None:
        session = current_session()
        return None if session is None else _lists.of(session)

    def append(self, reference: Any) -> None:
        own, session = self._own(), current_session()
        if own is None or session is None:
            super().append(reference)
            return
        if not own:  # Python does this at its exit
            session.exit_functions.insert(0, logging.shutdown)
        own.append(reference)

    def remove(self, reference: Any) -> None:
        own = self._own()
        super().remove(reference) if own is None else own.remove(reference)

    def __contains__(self, reference: object) -> bool:
        own = self._own()
        return super().__contains__(reference) if own is None else reference in own

    def __getitem__(self, place: Any) -> Any:
        own = self._own()
        return super().__getitem__(place) if own is None else own[place]

    def __delitem__(self, place: Any) -> None:
        own = self._own()
        if own is None:
            super().__delitem__(place)
        else:
            del own[place]


class _HandlerNames(MutableMapping[str, logging.Handler]):
    """Stands for `logging._handlers`, handlers by name."""

    def __init__(self, plain: "weakref.WeakValueDictionary[str, logging.Handler]") -> None:
        self._plain: Final = plain

    def _own(self) -> "weakref.WeakValueDictionary[str, logging.Handler]":
        session = current_session()
        return self._plain if session is None else _names.of(session)

    def __getitem__(self, name: str) -> logging.Handler:
        return self._own()[name]

    def __setitem__(self, name: str, handler: logging.Handler) -> None:
        self._own()[name] = handler

    def __delitem__(self, name: str) -> None:
        del self._own()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())


def _capture_warnings(session: SessionState, capture: bool) -> None:
    saved = _captured.of(session)
    if capture and not saved:
        saved.append(warnings.showwarning)
        warnings.showwarning = logging._showwarning  # type: ignore[attr-defined]
    elif not capture and saved:
        warnings.showwarning = saved.pop()


def install_log_handlers() -> None:
    """Patch `logging`."""
    handlers = _HandlerList(logging._handlerList)  # type: ignore[attr-defined]
    logging._handlerList = handlers  # type: ignore[attr-defined]
    logging.shutdown.__defaults__ = (handlers,)
    logging._handlers = _HandlerNames(logging._handlers)  # type: ignore[attr-defined]
    plain = logging.captureWarnings

    def capture_warnings(capture: bool) -> None:
        session = current_session()
        if session is None:
            plain(capture)
        else:
            _capture_warnings(session, capture)

    logging.captureWarnings = capture_warnings
