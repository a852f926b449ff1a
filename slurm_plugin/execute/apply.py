"""Applies a cycle's actions one by one, and tells what did not fit into the cycle's budget."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from muri.slurm_plugin.execute.interruptible import CycleCutShortError, InterruptibleGateway
from muri.slurm_plugin.planning.actions import (
    Action,
    Join,
    Preempt,
    ReleaseSolo,
    ResumeGroup,
    StartDryRun,
    StartGroup,
    started,
)

_KINDS: Final[Mapping[type[Action], str]] = {
    StartGroup: "start", ResumeGroup: "start", ReleaseSolo: "start", Join: "join", StartDryRun: "dry run",
    Preempt: "stop",
}  # fmt: skip
"""What people call an action; all others are repairs."""


class CarriesOut(Protocol):
    """Carries out single actions: the executor."""

    def carry_out(self, action: Action) -> None:
        """Carry out one action."""
        ...


@dataclass(frozen=True, slots=True)
class Left:
    """What a cycle leaves to the next one.

    Attributes:
        actions: In their order; the first may be half done.
        why: What they did not fit into.
    """

    actions: tuple[Action, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        """Such as "312 starts and 1 join are left for the next cycle: …"."""
        counts = Counter(_KINDS.get(type(action), "repair") for action in self.actions)
        *first, last = (f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in counts.items())
        what = f"{', '.join(first)} and {last}" if first else last
        return f"{what} {'is' if len(self.actions) == 1 else 'are'} left for the next cycle: {self.why}"

    def notes(self) -> dict[int, str]:
        """Return what to tell the jobs whose start is left, by job id."""
        return dict.fromkeys(sorted(started(self.actions)), f"its start is left for the next cycle: {self.why}")


def apply(actions: Sequence[Action], executor: CarriesOut, gateway: InterruptibleGateway) -> Left:
    """Carry out actions in their order until it is time to end; return those that are left.

    Args:
        actions: The most useful first.
        executor: Carries them out.
        gateway: The way to Slurm that it uses, with the budget.
    """
    for position, action in enumerate(actions):
        try:
            gateway.require_room()
            executor.carry_out(action)
        except CycleCutShortError as error:
            return Left(tuple(actions[position:]), str(error))
    return Left()
