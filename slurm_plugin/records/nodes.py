"""Slurm's folded host lists such as "gpu[01-04],login", and islands of a node's GPUs. Pure.

Which GPUs of a node reach each other fast follows from gres.conf: `Links` of each device, else `Cores`. Slurm chooses a
job's GPUs (tried on 26.05): the free one with the lowest index, then those linked to the ones chosen, then again the
lowest. So Muri can choose the node on which that gives a whole island.
"""

import math
import re
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetParseError

MOST_NODES: Final = 65_536
"""Longer host lists are refused before they are unfolded: a few characters can stand for billions of names."""

_HOST_LIST: Final = re.compile(r"[A-Za-z0-9._\[\],-]*")
_HOST: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_ITEM: Final = re.compile(r"(?:[^,\[]+|\[[^\[\]]*\]|\[)+")
"""A folded name, up to a comma between hosts, not within brackets; found in one pass, as a user may write 1 MiB."""

_BRACKETS: Final = re.compile(r"(?<!\d)(\d*)\[([^\[\]]*)\]")
_MOST_DIGITS: Final = 18
_MOST_BRACKETS: Final = 16
_RANGE: Final = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


class HostListError(ValueError):
    """A text is not a host list, or one of more hosts than any cluster has."""


@lru_cache(maxsize=1024)
def names_in(host_list: str) -> frozenset[str]:
    """Return the names in one of Slurm's folded host lists, such as "gpu[01-04],login".

    Raises:
        HostListError: It is malformed, or has too many.
    """
    if _HOST.fullmatch(host_list):
        return frozenset({host_list})
    if not _HOST_LIST.fullmatch(host_list):
        raise HostListError(f"{host_list[:80]!r} is not a list of nodes")
    try:
        if name_count(host_list) > MOST_NODES:
            raise HostListError(f"{host_list[:80]!r} lists more than {MOST_NODES} nodes")
        return frozenset(NodeSet(host_list, resolver=RESOLVER_NOGROUP))
    except (NodeSetParseError, ValueError) as error:
        raise HostListError(f"{host_list[:80]!r} is not a list of nodes: {str(error)[:80]}") from error


def folded(names: AbstractSet[str]) -> str:
    """Return a host list of some names."""
    return next(iter(names)) if len(names) == 1 else str(NodeSet.fromlist(sorted(names)))


def name_count(host_list: str) -> int:
    """Return how many names a folded host list stands for at most, without unfolding it; else a ValueError."""
    return sum(map(_count, _ITEM.findall(host_list)))


def _count(item: str) -> int:
    found = _BRACKETS.findall(item)
    if not len(found) == item.count("[") == item.count("]") or len(found) > _MOST_BRACKETS:
        raise HostListError(f"{item[:80]!r} has unpaired brackets, or too many")
    return math.prod(_size(digits, ranges) for digits, ranges in found)


def _size(digits: str, ranges: str) -> int:
    """Return how many names brackets stand for at most, with the digits before them; at least 1 for each range."""
    spans = [_RANGE.fullmatch(part) for part in ranges.split(",")]
    if None in spans or len(digits) > _MOST_DIGITS:
        raise HostListError(f"{ranges[:80]!r} must be ranges of numbers")
    texts = [(digits + span[1], digits + (span[2] or span[1])) for span in spans if span]
    if digits:  # ClusterShell joins them to the bounds: it reads n9[9,10] as n99 to n910
        numbers = [int(text) for each in texts for text in each]
        return (max(numbers) - min(numbers) + 1) * len({len(text) for each in texts for text in each})
    return sum(max(1, int(last) - int(first) + 1) for first, last in texts)


Islands = tuple[tuple[int, ...], ...]
"""Slurm's indices of a node's GPUs, by island."""

_WORD: Final = re.compile(r'([A-Za-z]+)\s*=\s*("[^"]*"|\S+)')
_MOST_DEVICES: Final = 64


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU in gres.conf; () and "" where the file does not tell its links or cores."""

    links: tuple[int, ...] = ()  # Connections to each device of the node, -1 for the device itself
    cores: str = ""  # Cores of its socket as the file writes them


def islands_of(texts: Iterable[str]) -> dict[str, Islands]:
    """Return the islands of each node that gres.conf names, where it tells them; "" stands for nodes without a name.

    Args:
        texts: gres.conf and the files that it includes.
    """
    devices: dict[str, list[Device]] = {}
    for line in (line for text in texts for line in re.sub(r"\\\s*\n", " ", text).splitlines()):
        words = {key.lower(): value.strip('"') for key, value in _WORD.findall(line.split("#", 1)[0])}
        if words.get("name", "").lower() == "gpu":
            for node in _node_names(words.get("nodename", "")):
                devices.setdefault(node, []).extend(_devices(words))
    return {node: islands for node, found in devices.items() if (islands := _islands(found))}


def _node_names(text: str) -> Iterable[str]:
    try:
        return sorted(names_in(text)) if text else ("",)
    except HostListError:
        return ()


def _devices(words: dict[str, str]) -> list[Device]:
    """Return the devices of a line: those of its `File`, else as many as its `Count`."""
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
    """Return islands by `Links` where every device has them and some are connected, else by cores; () where neither."""
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
    """Return sets of devices with direct connections from each to all others, the first ones first."""
    left, found = list(range(len(devices))), []
    while left:
        island = [left[0]]
        for other in left[1:]:
            if all(devices[one].links[other] > 0 and devices[other].links[one] > 0 for one in island):
                island.append(other)
        left = [index for index in left if index not in island]
        found.append(tuple(island))
    return tuple(found)
