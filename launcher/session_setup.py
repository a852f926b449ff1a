"""What a session has for itself when it starts."""

import ctypes
import os
from pathlib import Path
from types import ModuleType
from typing import Final

from muri.launcher import script
from muri.launcher.context import SessionState, open_streams
from muri.launcher.protocol import AttachRequest

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
_libc = ctypes.CDLL(None, use_errno=True)


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
    return SessionState(
        member=request.job_id,
        environment=environment,
        argv=[request.target, *request.arguments],
        path=[*own, *(entry for entry in base_path if entry not in own)],
        own_paths=len(own),
        files=files,
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
