"""Which GPUs of a node reach each other fast, from what gres.conf says of each device: `Links`, else `Cores`. Pure.

Which GPUs of a node a job gets is Slurm's choice (tried on 26.05): the free one with the lowest index, then those that
are linked to the ones chosen, then again the lowest. So Muri can choose the node on which that gives a whole island.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from muri.slurm_plugin.records.host_lists import HostListError, names_in

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
