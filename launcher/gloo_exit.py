"""Lets gloo's worker threads finish before Python ends.

A worker that still has to drop a tensor when Python is being finalized asks for the interpreter's lock,
is ended by Python in the middle of C++ and takes the whole process with it: "terminate called without
an active exception", exit code 134 instead of the script's own. PyTorch 2.13 with Python 3.11 does so in
every third run of two ranks that leave right after a collective, with `destroy_process_group` too if
something (DistributedDataParallel) still holds the group.
"""

import atexit
import time
from pathlib import Path
from typing import Final

_WORKER_NAME: Final = "pt_gloo_runloop"
_POLL_S: Final = 0.002
_QUIET_POLLS: Final = 3
_LIMIT_S: Final = 1.0
_TASKS: Final = Path("/proc/self/task")


def wait_at_exit() -> None:
    """Wait for the workers when the script and its own `atexit` functions are done: call this before they register."""
    atexit.register(wait_for_workers)


def wait_for_workers() -> None:
    """Give the interpreter's lock away until all workers sleep, one second at most; nothing where there are none.

    A worker that waits for a rank that is gone sleeps too, and is not waited for.
    """
    end_s = time.monotonic() + _LIMIT_S
    quiet = 0
    while quiet < _QUIET_POLLS and time.monotonic() < end_s:
        states = _worker_states()
        if not states:
            return
        quiet = quiet + 1 if states == {"S"} else 0
        time.sleep(_POLL_S)


def _worker_states() -> set[str]:
    """Letters of /proc/[pid]/stat (proc(5)) of gloo's workers."""
    states = set()
    for task in _TASKS.glob("*/stat"):
        try:
            before, _, after = task.read_text(encoding="utf-8", errors="replace").rpartition(")")
        except OSError:
            continue  # the thread ended meanwhile
        # The kernel keeps the first 15 letters of a thread's name, so the longest names lose their end.
        if before.partition("(")[2] == _WORKER_NAME[:15]:
            states.add(after.split()[0])
    return states
