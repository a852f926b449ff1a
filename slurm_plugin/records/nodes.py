"""Nodes: Slurm's folded host lists such as "gpu[01-04],login", and islands of their GPUs. Pure.

Which GPUs of a node reach each other fast follows from what gres.conf says of each device: `Links`, else `Cores`.
Which GPUs a job gets is Slurm's choice (tried on 26.05): the free one with the lowest index, then those that are linked
to the ones chosen, then again the lowest. So Muri can choose the node on which that gives a whole island.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
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
    """A text is not a host list, or one of more hosts than any cluster has."""


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


_WORD: Final = re.compile(r'([A-Za-z]+)\s*=\s*("[^"]*"|\S+)')
_MOST_DEVICES: Final = 64

Islands = tuple[tuple[int, ...], ...]
"""Slurm's indices of a node's GPUs, by island."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU as gres.conf has it.

    Attributes:
        links: Connections to each device of the node, -1 for the device itself; () where the file does not say.
        cores: Cores of its socket as the file writes them, "" where it does not say.
    """

    links: tuple[int, ...] = ()
    cores: str = ""


def islands_of(texts: Iterable[str]) -> dict[str, Islands]:
    """Return the islands of each node that gres.conf names, where it tells them; "" stands for nodes without a name.

    Args:
        texts: gres.conf and the files that it includes.
    """
    devices: dict[str, list[Device]] = {}
    for text in texts:
        for words in _lines(text):
            if words.get("name", "").lower() == "gpu":
                for node in _nodes(words.get("nodename", "")):
                    devices.setdefault(node, []).extend(_devices(words))
    return {node: islands for node, found in devices.items() if (islands := _islands(found))}


def _lines(text: str) -> Iterator[dict[str, str]]:
    """The words of each logical line, by key in lower case."""
    joined = re.sub(r"\\\s*\n", " ", text)
    for line in joined.splitlines():
        found = _WORD.findall(line.split("#", 1)[0])
        yield {key.lower(): value.strip('"') for key, value in found}


def _nodes(text: str) -> Iterable[str]:
    if not text:
        return ("",)
    try:
        return sorted(names_in(text))
    except HostListError:
        return ()


def _devices(words: dict[str, str]) -> list[Device]:
    """The devices of a line: those of its `File`, else as many as its `Count`."""
    cores = words.get("cores", words.get("cpus", ""))
    parts = words.get("links", "").split(",")
    links = tuple(int(part) for part in parts) if all(re.fullmatch(r"-?\d{1,4}", part) for part in parts) else ()
    files = words.get("file", "")
    if files:
        try:  # Slurm folds files as it folds hosts; a host list has no slashes
            count = len(names_in(files.replace("/dev/", "").replace("/", "-").lstrip("-")))
        except HostListError:
            return []
    else:
        count = int(words["count"]) if words.get("count", "").isdecimal() else 1
    return [Device(links, cores)] * min(count, _MOST_DEVICES)


def _islands(devices: Sequence[Device]) -> Islands:
    """Islands by `Links` where every device has them and some are connected, else by cores; () where neither tells."""
    count = len(devices)
    if all(len(device.links) == count and device.links.count(-1) == 1 for device in devices):
        # Slurm numbers devices by their own place in Links, whatever the order of the lines.
        ordered = sorted(devices, key=lambda device: device.links.index(-1))
        places = [device.links.index(-1) for device in ordered]
        found = _fully_linked(ordered) if places == list(range(count)) else ()
        if any(len(island) > 1 for island in found):
            return found
    by_cores: dict[str, list[int]] = {}
    for index, device in enumerate(devices):
        by_cores.setdefault(device.cores, []).append(index)
    return tuple(map(tuple, by_cores.values())) if len(by_cores) > 1 and "" not in by_cores else ()


def _fully_linked(devices: Sequence[Device]) -> Islands:
    """Sets of devices each of which has a direct connection to all others, the first ones first."""
    left, found = list(range(len(devices))), []
    while left:
        island = [left[0]]
        for other in left[1:]:
            if all(devices[one].links[other] > 0 and devices[other].links[one] > 0 for one in island):
                island.append(other)
        left = [index for index in left if index not in island]
        found.append(tuple(island))
    return tuple(found)
