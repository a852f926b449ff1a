"""Reads the islands of nodes' GPUs from gres.conf, where this host has the file that slurmctld reads."""

import contextlib
import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from muri.slurm_plugin.gateway.base import Gateway, GatewayError, SlurmUnreachableError
from muri.slurm_plugin.records.cluster import Node
from muri.slurm_plugin.records.nodes import HostListError, Islands, islands_of, names_in

log = logging.getLogger("muri.controller")

_INCLUDE: Final = re.compile(r"(?im)^\s*include\s+(\S+)")
_LARGEST: Final = 4 << 20


def default_path() -> Path:
    """Return where gres.conf is: beside slurm.conf."""
    return Path(os.environ.get("SLURM_CONF") or "/etc/slurm/slurm.conf").with_name("gres.conf")


class GresConf:
    """The islands that gres.conf tells, read anew when the file has changed.

    Args:
        path: The file, None for no file at all.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen: tuple[tuple[str, int, int], ...] = ()
        self._islands: dict[str, Islands] = {}

    def with_islands(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return nodes with their islands, where the file tells them and speaks of as many GPUs as Slurm."""
        islands = self._current()
        if not islands:
            return nodes
        found = [(node, islands.get(node.name) or islands.get("", ())) for node in nodes]
        return tuple(
            replace(node, gpu_islands=told) if told and sum(map(len, told)) == node.gpu_count else node
            for node, told in found
        )

    def with_places(self, gateway: Gateway, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return nodes with their islands and the GPUs in use; these are asked for only where they count.

        Raises:
            SlurmUnreachableError: slurmctld does not answer.
        """
        nodes = self.with_islands(nodes)
        if not any(map(_lacks_indices, nodes)):
            return nodes
        try:
            in_use = gpus_by_node(gateway.gpus_in_use())
        except SlurmUnreachableError:
            raise
        except GatewayError as error:
            log.warning("jobs are placed without knowing which GPUs are free: %s", error)
            return nodes
        return tuple(
            replace(node, gpus_in_use=in_use.get(node.name, ())) if _lacks_indices(node) else node for node in nodes
        )

    def _current(self) -> dict[str, Islands]:
        if self._path is None:
            return {}
        try:
            files = _tree(self._path)
            seen = tuple((str(path), (stat := path.stat()).st_mtime_ns, stat.st_size) for path in files)
            if seen != self._seen:
                self._islands = islands_of([_text(path) for path in files])
                self._seen = seen
        except OSError as error:
            # Without it jobs are placed by the number of free GPUs, as on sites without the file.
            if self._seen or not isinstance(error, FileNotFoundError):
                log.warning("which GPUs are near each other is not known: %s", error)
            self._seen, self._islands = (), {}
        return self._islands


def gpus_by_node(held: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """Return the GPUs in use on each node; `held` as `Gateway.gpus_in_use` tells them."""
    found: dict[str, set[int]] = {}
    for nodes, indices in held:
        with contextlib.suppress(HostListError):
            for name in names_in(nodes):
                found.setdefault(name, set()).update(indices)
    return {name: tuple(sorted(indices)) for name, indices in found.items()}


def _lacks_indices(node: Node) -> bool:
    """Whether it matters which of a node's GPUs are free, and its record does not tell."""
    used = node.gpus_allocated
    return bool(node.gpu_islands) and 0 < used < node.gpu_count and len(node.gpus_in_use) != used


def _tree(path: Path) -> Sequence[Path]:
    """The file and those that it includes, one level deep as Slurm's documentation shows it."""
    names = (Path(path.parent, name) for name in _INCLUDE.findall(_text(path)))
    return [path, *(file for name in names for file in sorted(name.parent.glob(name.name)))]


def _text(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_LARGEST)
