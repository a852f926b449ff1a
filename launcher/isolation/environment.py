"""Environment variables: `os.environ` holds the session's own."""

import os
from typing import Any

from muri.launcher.context import current_session


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


def install_environment() -> None:
    """Make `os.environ` and `os.environb` look into the session."""
    for environment in (os.environ, os.environb):
        environment.__class__ = SessionEnviron
