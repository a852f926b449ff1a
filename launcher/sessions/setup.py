"""Prepares what a script gets at its start: environment, GPUs, working directory, and short turns on the cores."""

import ctypes
import logging
import os
import signal
import struct
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

from muri.launcher.arbitration.arbiter import Arbiter
from muri.launcher.job import script
from muri.launcher.job.session import SessionState, open_streams
from muri.launcher.wire.protocol import AttachRequest

logger = logging.getLogger("muri.launcher")

GPU_VARIABLES: Final = (
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HIP_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
"""These name the GPUs that a process uses: the session's are the runtime's, not the member's."""

_CLONE_FS: Final = 0x200
SLICE_NS: Final = 100_000
"""The kernel's least slice. A thread with a short slice that wakes up overtakes one with a long slice, so a
member that was handed a resource does not wait for milliseconds behind a partner's long computation."""

_SYSTEM_CALLS: Final = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES: Final = struct.Struct("<IIQiIQQQII")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Terms:
    """What the arbiter is told of a member.

    Attributes:
        solo_iteration_s: Seconds of an iteration when alone, None when unknown.
        min_speed: The speed that it was promised, 1 = as fast as alone; 0: none.
    """

    solo_iteration_s: float | None = None
    min_speed: float = 0.0


NO_TERMS: Final = Terms()


class AttachedSession:
    """What a session of either kind has from its attach request on; see `job.session.MemberSession`."""

    def __init__(self, request: AttachRequest, arbiter: Arbiter, terms: Terms) -> None:
        self.member = request.job_id
        self.exit_code: int | None = None
        self.stopped_at: int | None = None
        self.fault: str | None = None
        self.lost_cause: str | None = None
        self.condemned = False
        self.out_of_memory = False
        self.hung = False
        self.paused = False
        self.client_pid = 0
        self._request = request
        self._arbiter = arbiter
        self._terms = terms

    def join_arbiter(self) -> None:
        """Let the arbiter know the member."""
        self._arbiter.join(self.member, self._terms.solo_iteration_s, self._terms.min_speed)

    def environment(self) -> Mapping[str, str]:
        """The member's environment, as it was handed over."""
        return self._request.environment

    def python(self) -> Mapping[str, str]:
        """The script's Python: its "prefix" and "executable"."""
        return {"prefix": self._request.prefix, "executable": self._request.executable}


def build_state(request: AttachRequest, files: tuple[int, int, int], base_path: list[str]) -> SessionState:
    """Everything that the session has for itself, before its script is loaded.

    Args:
        request: What the member handed over.
        files: Its standard input, output and error.
        base_path: sys.path of the interpreter without a script.
    """
    environment = {os.fsencode(name): os.fsencode(value) for name, value in request.environment.items()}
    for name in map(os.fsencode, GPU_VARIABLES):
        environment.pop(name, None)
        if name in os.environb:
            environment[name] = os.environb[name]
    own = script.own_directories(request.target, request.module, request.cwd, request.environment.get("PYTHONPATH", ""))
    shared = [entry for entry in base_path if entry not in own]
    return SessionState(
        member=request.job_id,
        environment=environment,
        argv=[request.target, *request.arguments],
        path=[*own, *shared],
        shared_path=frozenset(shared),
        files=files,
        handlers=dict.fromkeys(request.ignored, signal.SIG_IGN),
        streams=open_streams(files, unbuffered=bool(request.environment.get("PYTHONUNBUFFERED"))),
        main=ModuleType("__main__"),
    )


def own_working_directory(request: AttachRequest, state: SessionState) -> None:
    """Give this thread, and those it starts, a working directory and umask of their own."""
    if _libc.unshare(_CLONE_FS) != 0:
        reason = os.strerror(ctypes.get_errno())
        print(
            f"muri: the working directory is shared with the other members of the group ({reason}); use absolute paths",
            file=state.streams["stderr"],
        )
        return
    os.umask(request.umask)
    os.chdir(Path(request.cwd))


def wait_without_spinning(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP's threads sleep while they wait: spinning, they would take a core from the other members.

    Args:
        environment: Of the process that will load OpenMP; its own settings for waiting are kept.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & environment.keys():
        environment["OMP_WAIT_POLICY"] = "passive"


def take_short_turns(pid: int = 0, slice_ns: int = SLICE_NS) -> bool:
    """Ask for short slices on the CPU, for this thread and those that it will start.

    Linux knows slices of a thread's own since version 6.12 (sched_setattr(2), `sched_runtime`); others refuse or
    ignore them. The share of the CPU stays the same.

    Args:
        pid: The main thread of another process of this user, instead of this thread.
        slice_ns: Length of a slice.

    Returns:
        Whether the kernel took it.
    """
    number = _SYSTEM_CALLS.get(os.uname().machine)
    if number is None or os.sched_getscheduler(pid) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, pid)
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0, 0, 0)
    taken: bool = ctypes.CDLL(None, use_errno=True).syscall(number, pid, wanted, 0) == 0
    if not taken:
        logger.info("the kernel keeps its own scheduling slices: %s", os.strerror(ctypes.get_errno()))
    return taken
