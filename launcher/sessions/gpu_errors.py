"""Errors of the GPU that end a CUDA context, and with it the process.

After an illegal memory access or a device-side assert, every later call into CUDA fails in the whole process. The
runtime then ends. Its members go back to the queue, whatever their scripts reported meanwhile, and the runtime names
those that may have caused the error, so that they run without partners.
"""

import logging
import re
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from muri.launcher.job.out_of_memory import chain_of
from muri.launcher.job.session import MemberSession
from muri.launcher.sessions.gpu_streams import Device, preparation

logger = logging.getLogger("muri.launcher")

# CUDA's own words for the errors of which it says "leaves the process in an inconsistent state".
_STICKY: Final = re.compile(
    r"illegal memory access|device-side assert|unspecified launch failure|misaligned address|illegal instruction"
    r"|illegal address|invalid program counter|invalid address space|hardware stack error|uncorrectable ECC error"
    r"|operation not supported on global/shared address space|launch timed out and was terminated"
)
_ACCELERATOR: Final = re.compile(r"(CUDA|HIP) error")


@dataclass(frozen=True, slots=True)
class Fault:
    """Why the runtime cannot go on.

    Attributes:
        cause: The error, in CUDA's words.
        culprits: Job ids of the members that may have caused it.
    """

    cause: str
    culprits: tuple[str, ...]

    def status(self) -> dict[str, Any]:
        """The fault's part of the status file."""
        return asdict(self) | {"culprits": list(self.culprits)}


def sticky_text(error: BaseException, device: Device | None) -> str | None:
    """The error's text if it ended the CUDA context, else None.

    Args:
        error: What a script raised; its causes count as well.
        device: The GPU, which is asked whether it still works. Without one the words decide.
    """
    for link in chain_of(error):
        text = str(link)
        if isinstance(link, RuntimeError) and _ACCELERATOR.search(text) and _STICKY.search(text):
            return text.splitlines()[0] if device is None or is_dead(device) else None
    return None


def is_dead(device: Device) -> bool:
    """Whether the CUDA context is beyond use: a synchronisation fails, other than for lack of memory."""
    try:
        device.cuda.synchronize()
    except RuntimeError as error:
        return not isinstance(error, device.cuda.OutOfMemoryError)
    return False


class FaultWatch:
    """Looks at each session that ends, and ends the runtime after a fault.

    Attributes:
        fault: The first fault, None so far.
    """

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self._lock = threading.Lock()
        self._running: Callable[[], list[MemberSession]] = list
        self._end_runtime: Callable[[], None] = lambda: None

    def start(self, running: Callable[[], list[MemberSession]], end_runtime: Callable[[], None]) -> None:
        """Say who runs and how to end the runtime."""
        self._running, self._end_runtime = running, end_runtime

    def session_ended(self, session: MemberSession) -> None:
        """Called before the member's process learns of the end."""
        cause, device = session.fault, preparation.device
        if cause is None and device is not None and session.exit_code and is_dead(device):
            cause = "CUDA error: the context is beyond use, and the script did not say why"
        if cause is None:
            return
        session.condemned = True
        with self._lock:
            if self.fault is not None:
                return
            suspects = [] if device is None else device.suspects()
            self.fault = Fault(cause, tuple(dict.fromkeys([session.member, *suspects])))
        logger.error("%s: members are requeued; it may come from %s", cause, ", ".join(self.fault.culprits))
        for other in self._running():
            other.condemned = True
        self._end_runtime()


watch: Final = FaultWatch()
