"""How much memory a dataset cache may take where the script does not say: what the job was given less what it needs.

Synergy's plan gives a job memory for its processes and for its cache (`policies/allocation`), and Slurm tells the job
the sum. What the processes need of it is measured while the cache fills, when model and workers have long been there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muri.launcher.job.process_tree import descendants_of
from muri.units import MIB

SPARE: Final = 0.1
"""Share of the job's memory that stays free for what its processes need later."""

LOOKS: Final = 32
"""While it fills, the cache looks so often at what the processes need."""

_KIB: Final = 1024


@dataclass(frozen=True)
class Room:
    """What the caches of one process and its loader workers may take.

    Attributes:
        given_bytes: The job's memory on this node, by its ranks there.
        root: The process whose memory, with that of its descendants, counts as needed.
    """

    given_bytes: int
    root: int

    @property
    def step_bytes(self) -> int:
        """After so many bytes the cache looks again."""
        return max(1, self.given_bytes // LOOKS)

    def limit_bytes(self, others_bytes: int = 0) -> int:
        """What a cache may take now.

        Args:
            others_bytes: What other caches of the process hold.
        """
        needed = sum(map(_own_bytes, (self.root, *descendants_of(self.root)))) + others_bytes
        return max(0, int(self.given_bytes * (1 - SPARE)) - needed)


def room_of(environment: Mapping[str, str]) -> Room | None:
    """The room that Slurm's variables tell this process; None where they do not."""
    given = _given_bytes(environment)
    return None if given is None else Room(given // _local_ranks(environment), os.getpid())


def _given_bytes(environment: Mapping[str, str]) -> int | None:
    """Memory of the job on this node; 0 means the node's, which is no answer to how much is for this job."""
    per_node = _number(environment, "SLURM_MEM_PER_NODE")
    if per_node:
        return per_node * MIB
    for each, count in (("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"), ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE")):
        amount, many = _number(environment, each), _number(environment, count)
        if amount and many:
            return amount * many * MIB
    return None


def _local_ranks(environment: Mapping[str, str]) -> int:
    """Ranks of the job on this node, each of which has a cache of its own."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        count = _number(environment, name)
        if count:
            return count
    return 1


def _number(environment: Mapping[str, str], name: str) -> int:
    """The whole number that a value begins with, as in "2(x3)"; 0 where there is none."""
    digits = ""
    for char in environment.get(name, "").strip():
        if not char.isdecimal():
            break
        digits += char
    return int(digits) if digits else 0


def _own_bytes(pid: int) -> int:
    """Memory of a process that is no file's; what it shares with others, by their number where the kernel tells."""
    for name, key in (("smaps_rollup", "Pss_Anon:"), ("status", "RssAnon:")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(f"/proc/{pid}/{name}").read_text().splitlines():
                if line.startswith(key):
                    return int(line.split()[1]) * _KIB
    return 0
