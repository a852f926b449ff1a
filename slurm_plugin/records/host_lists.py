"""Slurm's folded host lists, such as "gpu[01-04],login". Pure."""

import math
import re
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Final

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetParseError

MOST_NODES: Final = 65_536
"""Longer lists are refused before they are unfolded: a few characters can stand for thousands of millions of names."""

_FORM: Final = re.compile(r"[A-Za-z0-9._\[\],-]*")

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""One host."""

_COMMA: Final = re.compile(r",(?![^\[]*\])")
"""A comma between hosts, not within brackets."""


class HostListError(ValueError):
    """A text is no host list, or one of more hosts than any cluster has."""


@lru_cache(maxsize=1024)
def names_in(host_list: str) -> frozenset[str]:
    """Return the names in a host list.

    Raises:
        HostListError: It is none, or has too many.
    """
    if _NAME.fullmatch(host_list):
        return frozenset({host_list})
    if not _FORM.fullmatch(host_list):
        raise HostListError(f"{host_list[:80]!r} is not a list of nodes")
    try:
        if sum(map(_count, _COMMA.split(host_list))) > MOST_NODES:
            raise HostListError(f"{host_list[:80]!r} lists more than {MOST_NODES} nodes")
        return frozenset(NodeSet(host_list, resolver=RESOLVER_NOGROUP))
    except (NodeSetParseError, ValueError) as error:
        raise HostListError(f"{host_list[:80]!r} is not a list of nodes: {str(error)[:80]}") from error


def folded(names: AbstractSet[str]) -> str:
    """Return a host list of some names."""
    return next(iter(names)) if len(names) == 1 else str(NodeSet.fromlist(sorted(names)))


def _count(item: str) -> int:
    """How many names one folded name stands for, at least 1."""
    return math.prod(sum(map(_size, bracket.split(","))) for bracket in re.findall(r"\[([^\[\]]*)\]", item))


def _size(part: str) -> int:
    first, _, last = part.partition("-")
    return int(last) - int(first) + 1 if first.isdecimal() and last.isdecimal() else 1
