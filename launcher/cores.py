"""How the threads of several members get along on the same cores."""

import ctypes
import logging
import os
import struct
from collections.abc import MutableMapping
from typing import Final

logger = logging.getLogger("muri.launcher")

SLICE_NS: Final = 100_000
"""The kernel's least slice. A thread with a short slice that wakes up overtakes one with a long slice, so a
member that was handed a resource does not wait for milliseconds behind a partner's long computation."""

_SYSTEM_CALLS: Final = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES: Final = struct.Struct("<IIQiIQQQII")


def wait_without_spinning(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP's threads sleep while they wait: spinning, they would take a core from the other members.

    Args:
        environment: Of the process that will load OpenMP; what it says of waiting already is kept.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & environment.keys():
        environment["OMP_WAIT_POLICY"] = "passive"


def take_short_turns(slice_ns: int = SLICE_NS) -> bool:
    """Ask for short slices on the CPU, for this thread and those that it will start.

    Linux knows slices of a thread's own since version 6.12 (sched_setattr(2), `sched_runtime`); others refuse or
    ignore them. The share of the CPU stays the same.

    Returns:
        Whether the kernel took it.
    """
    number = _SYSTEM_CALLS.get(os.uname().machine)
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0, 0, 0)
    taken: bool = ctypes.CDLL(None, use_errno=True).syscall(number, 0, wanted, 0) == 0
    if not taken:
        logger.info("the kernel keeps its own scheduling slices: %s", os.strerror(ctypes.get_errno()))
    return taken
