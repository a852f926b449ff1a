"""Decides which jobs may run in the group: the controller has put them there, and the GPU has memory for them."""

import functools
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from muri.clock import GIB
from muri.errors import MuriError
from muri.launcher.job.environment import STEPS_VARIABLE
from muri.launcher.job.scheduler import Membership, load_membership
from muri.launcher.runtime.member_table import MemberTable

logger = logging.getLogger("muri.launcher")

LIMIT_S: Final = 30.0

_ASK: Final = """
import ctypes
cuda, device, total = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_size_t()
error = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
print(error or cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device), total.value)
"""


def total_gib() -> float | None:
    """Return the memory of this process's first GPU; None where no CUDA driver tells it.

    A child asks: the memory that the driver takes for itself is free again with its end.
    """
    ask = [sys.executable, "-I", "-S", "-c", _ASK]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    if answer[0] != "0":
        logger.warning("the CUDA driver does not tell the GPU's memory (error %s)", answer[0])
        return None
    return int(answer[1]) / GIB


CONTEXT_GIB: Final = 0.5
"""Memory of a CUDA context and its libraries, which a profile does not count: one for each member with a process of its
own, one for all threads. NVIDIA's vary from 0.3 to 0.6 GiB."""

START_S: Final = 30.0
"""After this time an admitted member counts as running, or has failed to start."""


class AdmissionControl:
    """Lets new members into a runtime that runs in a pilot job.

    The connection proves only that its other end belongs to the same user. Which job belongs here, the controller has
    written into the job's AdminComment, which users cannot change. `membership` returns the scheduler's interface, when
    first needed.
    """

    def __init__(
        self, pilot_job: str | None, table: MemberTable, membership: Callable[[], Membership] = load_membership
    ) -> None:
        self.pilot_job = pilot_job
        self._table = table
        self._membership = membership

    def environment(self, job_id: str) -> dict[str, str]:
        """Return variables that tell a member's script the scheduler's choices for it."""
        steps = self._table.spec_of(job_id).accumulate_steps if job_id in self._table else 1
        return {STEPS_VARIABLE: str(steps)} if steps > 1 else {}

    def refusal(self, job_id: str) -> str:
        """Return why a job that is not a member yet cannot become one, "" when it is one now."""
        if job_id in self._table:
            return ""
        if self.pilot_job is None:
            return f"job {job_id} is not a member of this group"
        if self._table.discipline == "lockstep":
            return f"job {job_id} has no place in the rotation of this group"
        try:
            place = self._membership().place_of(job_id)
        except MuriError as error:
            return f"it is not known whether job {job_id} belongs to this group: {error}"
        if place is None or place.pilot != self.pilot_job:
            return f"job {job_id} is not a member of this group"
        self._table.add(place.member)
        steps = place.member.accumulate_steps
        logger.info("job %s joins the group%s", job_id, f", with batches in {steps} parts" if steps > 1 else "")
        return ""


class MemoryAdmission:
    """Keeps members out that would exceed the GPU's memory.

    Members' peaks are the planned ones, and the measured ones once there are any. A shared process knows the GPU; else
    the driver is asked, and without one all are admitted.
    """

    def __init__(self, table: MemberTable, now: Callable[[], float] = time.monotonic) -> None:
        self._table = table
        self._now = now
        self._lock = threading.Lock()
        self._let_in_s: dict[str, float] = {}
        self._driver_gib = functools.cache(total_gib)

    def refusal(self, member: str) -> dict[str, str] | None:
        """Return why a member cannot be let in now, None when it can.

        A refused member goes back to the queue and runs alone: an out-of-memory error in the middle of its training, or
        of a partner's, would cost more.
        """
        need_gib = self._table.spec_of(member).gpu_mem_gib
        if not need_gib:
            return None
        own_gib = None if self._table.threads is None else self._table.threads.gpu_mem_gib()
        capacity_gib = self._driver_gib() if own_gib is None else own_gib
        if capacity_gib is None:
            return None
        with self._lock:
            used_gib = self._used_gib(member)
            if used_gib <= CONTEXT_GIB or used_gib + need_gib <= capacity_gib:
                self._let_in_s[member] = self._now()
                return None
        reason = (
            f"job {member} needs {need_gib:.1f} GiB of GPU memory; its partners and CUDA have {used_gib:.1f} of "
            f"{capacity_gib:.1f} GiB"
        )
        logger.warning("%s: it is refused", reason)
        return {"kind": "memory", "reason": reason}

    def _used_gib(self, newcomer: str) -> float:
        """Return the GiB that the others and CUDA use, including members that were admitted a moment ago."""
        running = self._table.running()
        names = {session.member for session in running}
        now_s = self._now()
        self._let_in_s = {m: s for m, s in self._let_in_s.items() if m not in names and now_s - s < START_S}
        contexts = 1 + sum(session.isolation == "process" for session in running)
        others = (names | self._let_in_s.keys()) - {newcomer}
        planned_gib = {member: self._table.spec_of(member).gpu_mem_gib or 0.0 for member in others}
        need_gib = {**planned_gib, **self._table.measured_gpu_mem_gib()}
        return sum(need_gib[member] for member in others) + contexts * CONTEXT_GIB
