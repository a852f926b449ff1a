"""Parts that sessions of both kinds need: their terms, short turns on the cores, the notice to a script that hangs."""

import contextlib
import ctypes
import logging
import os
import signal
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

from muri.group_spec import MemberSpec
from muri.launcher.arbitration.arbiter import Arbiter
from muri.launcher.job.stage_clock import StageClock
from muri.launcher.protocol import AttachRequest

logger = logging.getLogger("muri.launcher")

GPU_VARIABLES: Final = (
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HIP_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
"""These name the GPUs that a process uses: a session has those of the runtime, not of the member."""

SLICE_NS: Final = 100_000
"""The kernel's least slice. A thread with a short slice that wakes up overtakes one with a long slice, so a
member that was handed a resource does not wait for milliseconds behind a partner's long computation."""

_SYSTEM_CALLS: Final = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES: Final = struct.Struct("<IIQiIQQQII")

CANCEL_GRACE_S: Final = 20.0
"""After this time a process is killed; a thread is abandoned: it goes on, but gets no resource."""

HUNG_EXIT_CODE: Final = 124
"""Exit code of a thread that was ended because it hung; timeout(1) uses the same."""

HUNG_GRACE_S: Final = 2.0
"""After this time a hanging script is abandoned, or its process killed: it rarely ends by itself."""

DEVICE_FILES: Final = ("/dev/nvidiactl", "/dev/kfd")


class MemberSession(ABC):
    """One run of a member's script: `process_session.ProcessSession`, or a thread (`launcher.threads`)."""

    isolation: str  # "thread" or "process"
    clock: StageClock
    ended: threading.Event  # set when the script ended and was cleaned up

    def __init__(self, request: AttachRequest, arbiter: Arbiter, spec: MemberSpec | None) -> None:
        self.member = request.job_id
        self.exit_code: int | None = None  # of the script; None until it ended, or if it has not told
        self.stopped_at: int | None = None  # iteration at which the script was saved and stopped, else None
        self.fault: str | None = None  # the script's error if that ended the CUDA context of this process
        self.lost_cause: str | None = None  # why the script must run again, but for the runtime's end
        self.condemned = False  # its exit code means nothing, because the CUDA context has ended
        self.out_of_memory = False  # the script ended for lack of GPU memory
        self.hung = False  # it is being ended, or was, because it hangs
        self.paused = False  # its job is suspended
        self.client_pid = 0  # the member's process in its own job; 0 once it is gone, or if it cannot be seen
        self.request = request
        self._arbiter = arbiter
        self._verdict = threading.Lock()  # held while its end is decided, never while the script waits
        self._spec = spec or MemberSpec(request.job_id)

    @property
    def checkpointed(self) -> bool:
        """Whether the script has told the runtime how to save it."""
        return False

    @property
    def script_pid(self) -> int | None:
        """The script's own process; None for a thread, and once it is gone, or if it cannot be seen."""
        return self.client_pid or None if self.isolation == "process" else None

    @property
    @abstractmethod
    def lost(self) -> bool:
        """Whether the runtime's end cut the script short, so that its exit code means nothing."""

    @abstractmethod
    def start(self, on_end: Callable[["MemberSession"], None]) -> None:
        """Run the script, or watch it; `on_end` is called once, when it has ended."""

    @abstractmethod
    def end(self, signum: int, grace_s: float = CANCEL_GRACE_S) -> None:
        """End the script with a signal's default action, and insist on it after `grace_s` seconds."""

    def end_as_hung(self, cause: str) -> None:
        """End a script that hangs: the cause goes to its standard error."""
        with self._verdict:
            if self.ended.is_set():
                return
            self.hung = True
        self.tell(cause)
        logger.warning("member %s: %s", self.member, cause)
        self.end(signal.SIGTERM, HUNG_GRACE_S)

    @abstractmethod
    def tell(self, text: str) -> None:
        """Write a line to the script's standard error, without waiting for its reader."""

    @abstractmethod
    def working_threads(self) -> list[Path]:
        """Return the threads that work for the script, as directories in /proc; none if it cannot be seen from here."""

    @abstractmethod
    def facts(self) -> Mapping[str, Any] | None:
        """Return the script's facts beside its iterations (`launcher.script.script_facts`), None before."""

    @abstractmethod
    def shut_down(self, grace_s: float) -> None:
        """Give the script up, because the runtime ends: a thread ends with it."""

    def join_arbiter(self) -> None:
        """Let the arbiter know the member."""
        self._arbiter.join(self.member, self._spec.solo_iteration_s, self._spec.min_speed)


def write_notice(file: int, text: str) -> None:
    """Write a line to a member's standard error, from a thread: what hangs may be the reader of that file.

    `file` is closed after it.
    """

    def write() -> None:
        with contextlib.suppress(OSError), os.fdopen(file, "w") as stream:
            stream.write(f"muri: {text}\n")

    threading.Thread(target=write, name="notice", daemon=True).start()


def call_later(delay_s: float, function: Callable[..., object], *arguments: Any) -> None:
    """Call a function after some seconds, in a thread of its own that does not keep the process alive."""
    timer = threading.Timer(delay_s, function, arguments)
    timer.daemon = True
    timer.start()


def has_gpu() -> bool:
    """Return whether this node has a GPU, as far as its device files tell: nothing is loaded to find out."""
    return any(Path(file).exists() for file in DEVICE_FILES)


def wait_without_spinning(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP's threads sleep while they wait: spinning, they would take a core from the other members.

    `environment` is that of the process that will load OpenMP; its own settings for waiting are kept.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & environment.keys():
        environment["OMP_WAIT_POLICY"] = "passive"


def take_short_turns(pid: int = 0) -> None:
    """Ask for short slices on the CPU, for this thread and those that it starts.

    Linux knows slices of a thread's own since version 6.12 (sched_setattr(2), `sched_runtime`); others refuse or ignore
    them. The share of the CPU stays the same. `pid` is the main thread of another process of this user, instead of this
    thread.
    """
    number = _SYSTEM_CALLS.get(os.uname().machine)
    if number is None or os.sched_getscheduler(pid) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, pid)
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, SLICE_NS, 0, 0, 0, 0)
    if ctypes.CDLL(None, use_errno=True).syscall(number, pid, wanted, 0) != 0:
        logger.info("the kernel keeps its own scheduling slices: %s", os.strerror(ctypes.get_errno()))
