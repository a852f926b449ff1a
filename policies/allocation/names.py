"""Names of Synergy's policies: a mechanism that shares out CPUs and memory, and an order of the queue."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

PREFIX: Final = "synergy"

MECHANISMS: Final = ("proportional", "greedy", "tune", "opt")
"""Ways to share out CPUs and memory: Synergy (OSDI 2022), sections 3 and 4."""

ORDERS: Final = ("fifo", "srtf", "las", "ftf")
"""Orders of the queue: first in first out, shortest remaining time, least attained service, finish-time fairness."""

ALIASES: Final = {f"{PREFIX}-{mechanism}": f"{PREFIX}-{mechanism}-fifo" for mechanism in MECHANISMS}
"""Short names: a mechanism alone goes by submit time."""


@dataclass(frozen=True, slots=True)
class SynergyName:
    """What the name of a policy says.

    Attributes:
        mechanism: One of `MECHANISMS`.
        order: One of `ORDERS`.
    """

    mechanism: str
    order: str

    def __str__(self) -> str:
        """The name in full."""
        return f"{PREFIX}-{self.mechanism}-{self.order}"


SYNERGY_NAMES: Final = tuple(str(SynergyName(mechanism, order)) for mechanism in MECHANISMS for order in ORDERS)
"""All names in full: synergy-proportional-fifo to synergy-opt-ftf."""


def parse_name(name: str) -> SynergyName | None:
    """What a name or one of `ALIASES` says; None when no policy of Synergy has it."""
    full = ALIASES.get(name, name)
    if full not in SYNERGY_NAMES:
        return None
    _, mechanism, order = full.split("-")
    return SynergyName(mechanism, order)


def listed(names: Iterable[str]) -> tuple[str, ...]:
    """Names of policies as people read them: Synergy's sixteen as one pattern, where its first would be."""
    pattern = f"{PREFIX}-{{{','.join(MECHANISMS)}}}-{{{','.join(ORDERS)}}}"
    return tuple(dict.fromkeys(pattern if name in SYNERGY_NAMES else name for name in names))
