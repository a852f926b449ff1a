"""Lets a member in only if the GPU has memory for it beside those that run: by profile, before it starts."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from muri.launcher.gpu.streams import preparation
from muri.launcher.member_session import MemberSession

logger = logging.getLogger("muri.launcher")

CONTEXT_GIB: Final = 0.5
"""What a CUDA context and its libraries take beside the tensors that a profile counts: one for the
runtime, one for each member with a process of its own. NVIDIA's vary from 0.3 to 0.6 GiB."""

START_S: Final = 30.0
"""A member that was let in counts as running by then, or did not start."""


class MemoryAdmission:
    """Adds up what members need.

    Args:
        need_gib: Peak GPU memory of members alone, from their profiles; who is missing counts as 0.
        running: The sessions under way.
        device_gib: Memory of the GPU; None: it is asked, and without a GPU everybody is let in.
    """

    def __init__(
        self,
        need_gib: Mapping[str, float],
        running: Callable[[], list[MemberSession]],
        device_gib: float | None = None,
    ) -> None:
        self._need_gib = need_gib
        self._running = running
        self._device_gib = device_gib
        self._lock = threading.Lock()
        self._let_in_s: dict[str, float] = {}

    def refusal(self, member: str) -> dict[str, str] | None:
        """Why a member cannot be let in now, None when it can.

        A refused member goes back to the queue and runs alone: an out-of-memory error in the
        middle of its training, or of a partner's, would cost more.
        """
        need_gib = self._need_gib.get(member, 0.0)
        capacity_gib = self._capacity_gib() if need_gib else None
        if capacity_gib is None:
            return None
        with self._lock:
            used_gib = self._used_gib(member)
            if used_gib <= CONTEXT_GIB or used_gib + need_gib <= capacity_gib:
                self._let_in_s[member] = time.monotonic()
                return None
        reason = (
            f"job {member} needs {need_gib:.1f} GiB of GPU memory; its partners and CUDA have {used_gib:.1f} of "
            f"{capacity_gib:.1f} GiB"
        )
        logger.warning("%s: it is refused", reason)
        return {"kind": "memory", "reason": reason}

    def _used_gib(self, newcomer: str) -> float:
        """What the others and CUDA have, those included that were let in a moment ago."""
        running = self._running()
        names = {session.member for session in running}
        now_s = time.monotonic()
        self._let_in_s = {m: s for m, s in self._let_in_s.items() if m not in names and now_s - s < START_S}
        contexts = 1 + sum(session.isolation == "process" for session in running)
        others = (names | self._let_in_s.keys()) - {newcomer}
        return sum(self._need_gib.get(member, 0.0) for member in others) + contexts * CONTEXT_GIB

    def _capacity_gib(self) -> float | None:
        if self._device_gib is not None:
            return self._device_gib
        device = preparation.ready()
        return None if device is None else device.mem_gib
