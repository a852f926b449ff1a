"""Counts what is asked of Slurm, in one place for both gateways."""

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from muri.slurm_plugin.gateway.base import Gateway, NoSuchJobError, SlurmUnreachableError

Requests = Counter[tuple[str, str]]
"""How often something was asked for: the gateway's method, and "done", "refused", "gone" or "unreachable"."""


def counted(gateway: Gateway, requests: Requests) -> Gateway:
    """Return the same way to Slurm; each of its calls is counted, also of methods that come later."""
    return cast("Gateway", _Counted(gateway, requests))


class _Counted:
    def __init__(self, gateway: Gateway, requests: Requests) -> None:
        self._gateway = gateway
        self._requests = requests

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._gateway, name)
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
