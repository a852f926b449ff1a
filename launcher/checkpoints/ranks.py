"""The ranks of one job save at the same iteration, and resume from a checkpoint that all of them have."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final, Protocol

from muri.errors import UsageError

CHECK_INTERVAL_S: Final = 0.5
"""Seconds between two votes of the ranks on saving; rank 0 converts them into a number of iterations."""


class Agreement(Protocol):
    """How the ranks of a job decide together. Each call is made by all of them, in the same order.

    Attributes:
        rank: This process's rank.
        world_size: How many there are.
    """

    rank: int
    world_size: int

    def decide(self, stop: bool, due: bool, iteration_s: float | None) -> tuple[bool, bool]:
        """Whether to stop and whether to save at this boundary, the same on every rank.

        Args:
            stop: Whether this rank was asked to stop; one is enough.
            due: Whether a periodic checkpoint is due; rank 0's word counts.
            iteration_s: Seconds per iteration lately, None when unknown.
        """

    def all_true(self, mine: bool) -> bool:
        """Whether the value is true on every rank."""

    def common(self, newest: int) -> int:
        """The newest iteration that every rank has, given this rank's newest; -1 stands for none."""


class OneRank:
    """A job with a single process."""

    rank = 0
    world_size = 1

    def decide(self, stop: bool, due: bool, iteration_s: float | None) -> tuple[bool, bool]:
        """Its own word."""
        return stop, due

    def all_true(self, mine: bool) -> bool:
        """Its own word."""
        return mine

    def common(self, newest: int) -> int:
        """Its own."""
        return newest


class ManyRanks:
    """Ranks that agree through a process group of their own (gloo: small numbers on the CPU)."""

    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed
        self._group = distributed.new_group(backend="gloo")
        self.rank: int = distributed.get_rank()
        self.world_size: int = distributed.get_world_size()
        self._boundaries_left = 1

    def decide(self, stop: bool, due: bool, iteration_s: float | None) -> tuple[bool, bool]:
        """Ask the others every half second or so, counted in iterations so that all ask at the same boundary."""
        self._boundaries_left -= 1
        if self._boundaries_left > 0:
            return False, False
        first = self.rank == 0
        interval = max(1, int(CHECK_INTERVAL_S / iteration_s)) if first and iteration_s else 0
        stop_any, due_first, interval = self._largest(int(stop), int(due and first), interval)
        self._boundaries_left = max(1, interval)
        return bool(stop_any), bool(due_first)

    def all_true(self, mine: bool) -> bool:
        """True only if every rank says so."""
        return not self._largest(int(not mine))[0]

    def common(self, newest: int) -> int:
        """The smallest of the ranks' newest: no rank removes a checkpoint before all have a newer one."""
        return -self._largest(-newest)[0]

    def _largest(self, *values: int) -> list[int]:
        import torch  # a script with several ranks has imported it

        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        self._distributed.all_reduce(tensor, op=self._distributed.ReduceOp.MAX, group=self._group)
        return [int(value) for value in tensor]


def agreement(environment: Mapping[str, str] = os.environ) -> Agreement:
    """How this script's ranks agree.

    Raises:
        UsageError: The script has several ranks that are not connected yet.
    """
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return ManyRanks(distributed) if distributed.get_world_size() > 1 else OneRank()
    size = environment.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        raise UsageError(
            f"this script has {size} ranks (WORLD_SIZE) that are not connected yet; call muri.checkpoint after "
            "torch.distributed.init_process_group, so that all ranks can save at the same iteration"
        )
    return OneRank()
