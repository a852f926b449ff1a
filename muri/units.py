"""Units as Slurm counts: memory in binary units, as CUDA does, too, and time limits in whole minutes."""

from __future__ import annotations

from typing import Final

KIB: Final = 2**10
"""Bytes of a KiB."""

MIB: Final = 2**20
"""Bytes of a MiB."""

GIB: Final = 2**30
"""Bytes of a GiB."""

KIB_PER_MIB: Final = 1024
MIB_PER_GIB: Final = 1024


def whole_minutes(seconds: int) -> int:
    """Return a time limit in minutes, rounded up."""
    return -(-seconds // 60)


def counted(count: int, noun: str) -> str:
    """Return a number and what is counted: "1 change", "2 changes"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
