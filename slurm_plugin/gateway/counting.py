"""Counts what is asked of Slurm, in one place for both gateways."""

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from muri.slurm_plugin.gateway.base import NoSuchJobError, SlurmUnreachableError

Requests = Counter[tuple[str, str]]
"""How often something was asked for: the method, and "done", "refused", "gone" or "unreachable"."""


_Way = TypeVar("_Way")


def counted(way: _Way, requests: Requests) -> _Way:
    """Return the same way to Slurm, a gateway or the accounts; each of its calls is counted."""
    return cast("_Way", _Counted(way, requests))


class _Counted:
    def __init__(self, way: object, requests: Requests) -> None:
        self._way = way
        self._requests = requests

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._way, name)
        return self._counting(name, value) if callable(value) else value

    def _counting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def count(*arguments: Any, **named: Any) -> Any:
            outcome = "refused"
            try:
                result = call(*arguments, **named)
                outcome = "done"
            except SlurmUnreachableError:
                outcome = "unreachable"
                raise
            except NoSuchJobError:
                outcome = "gone"
                raise
            finally:
                self._requests[name, outcome] += 1
            return result

        return count
