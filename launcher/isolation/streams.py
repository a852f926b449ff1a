"""Standard streams: sys.stdin, stdout and stderr lead to the session's own files."""

import sys
from types import ModuleType
from typing import Any, Final

from muri.launcher.context import current_session
from muri.launcher.isolation.module_properties import add_properties

_STREAM_NAMES: Final = ("stdin", "stdout", "stderr")


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


def install_streams() -> None:
    """Put proxies in place of the process's streams."""
    properties: dict[str, property] = {}
    for name in _STREAM_NAMES:
        stream = getattr(sys, name)
        own = StreamProxy(name, stream, follow_replaced=False)
        # The interpreter itself (print, input, tracebacks) reads the module's dictionary.
        sys.__dict__[name] = StreamProxy(name, stream, follow_replaced=True)
        sys.__dict__[f"__{name}__"] = own
        properties[name] = _stream_property(name, own)
    add_properties(sys, properties)
