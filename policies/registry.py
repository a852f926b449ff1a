"""Policies by name."""

import difflib
from collections.abc import Callable
from typing import Final

from muri.errors import UsageError
from muri.policies.muri import Auto, Fifo, MuriL, MuriS, Srsf
from muri.policies.options import PolicyOptions
from muri.policies.types import Policy


class UnknownPolicyError(UsageError):
    """No policy has the name."""


_FACTORIES: Final[dict[str, Callable[[PolicyOptions], Policy]]] = {
    "auto": Auto,
    "muri-s": MuriS,
    "muri-l": MuriL,
    "fifo": Fifo,
    "srsf": Srsf,
}


def policy_names() -> tuple[str, ...]:
    """The names that `get_policy` knows, the default first."""
    return tuple(_FACTORIES)


def get_policy(name: str, options: PolicyOptions | None = None) -> Policy:
    """Make a policy.

    Args:
        name: One of `policy_names`.
        options: Its options; the defaults when None.

    Raises:
        UnknownPolicyError: Lists the valid names and the nearest one.
    """
    factory = _FACTORIES.get(name)
    if factory is None:
        near = difflib.get_close_matches(name.lower(), _FACTORIES, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UnknownPolicyError(f"unknown policy {name!r}{hint}; valid are: {', '.join(_FACTORIES)}")
    return factory(options or PolicyOptions())
