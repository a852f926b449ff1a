"""Functions that lead to an object of the calling thread's session."""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from muri.launcher.context import PerSession, current_session


def by_session(plain: Callable[..., Any], objects: PerSession[Any]) -> Callable[..., Any]:
    """A function in place of a bound method of the process's object: it calls that of the session's.

    Args:
        plain: The bound method.
        objects: The sessions' objects.
    """
    name = plain.__name__

    def call(*args: Any, **kwargs: Any) -> Any:
        session = current_session()
        return (plain if session is None else getattr(objects.of(session), name))(*args, **kwargs)

    return update_wrapper(call, plain)
