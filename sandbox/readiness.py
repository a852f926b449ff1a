"""What the controller says of the nodes, and which of them a start still waits for. Pure: text in, states out."""

from collections.abc import Iterable
from dataclasses import dataclass

#: `sinfo`'s columns that `parse_nodes` reads: name, state, reason.
SINFO_FORMAT = "%N|%T|%E"

#: A restarted controller finds jobs running, hence not only "idle".
USABLE = frozenset({"idle", "mixed", "allocated", "completing"})


@dataclass(frozen=True)
class NodeState:
    """A node as the controller sees it. A state that ends in `*` marks a node that does not answer (yet)."""

    name: str
    state: str
    reason: str = "none"

    @property
    def usable(self) -> bool:
        """Whether jobs can start on it."""
        return self.state in USABLE

    def __str__(self) -> str:
        """Return what a person needs to know of it."""
        return f"{self.name} is {self.state}" + ("" if self.reason == "none" else f" ({self.reason})")


def parse_nodes(text: str) -> dict[str, NodeState]:
    """Read what `sinfo --noheader --Node --format=%N|%T|%E` prints, by the nodes' names."""
    lines = (line.split("|", 2) for line in text.splitlines() if line.count("|") >= 2)
    return {name: NodeState(name, state, reason.strip()) for name, state, reason in lines}


def waiting_for(names: Iterable[str], nodes: dict[str, NodeState]) -> list[NodeState]:
    """Return those of the named nodes that are not usable; one that the controller leaves out is unknown."""
    states = (nodes.get(name, NodeState(name, "unknown")) for name in names)
    return [node for node in states if not node.usable]
