"""The session of threads that PyTorch starts in C++, such as autograd's one per GPU.

PyTorch hands certain thread-local objects on to the threads that work on a backward pass. The session is put
among them before each pass.
"""

import sys
from types import ModuleType
from typing import Any, Final

from muri.launcher.context import SessionState, current_session, look_up_foreign_threads
from muri.launcher.isolation.import_hooks import after_import

_KEY: Final = "muri.session"


def _spare_threads(torch: ModuleType) -> None:
    """Let sessions' threads keep nothing that only autograd's threads of a GPU would look at.

    PyTorch drops it when the thread has ended for Python; a free-threaded interpreter was seen to crash there.
    """
    plain = torch._C._stash_obj_in_tls

    def stash(key: str, value: object) -> None:
        if current_session() is None or torch.cuda.is_initialized():
            plain(key, value)

    torch._C._stash_obj_in_tls = stash


def _patch_autograd(torch: ModuleType) -> None:
    core = torch._C
    if not hasattr(core, "_stash_obj_in_tls"):
        return  # hooks that print in such a thread print to the runtime's output
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        _spare_threads(torch)
    plain = torch.autograd.graph._engine_run_backward

    def engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        session = current_session()
        if session is None:
            return plain(*args, **kwargs)
        before = look_up()
        core._stash_obj_in_tls(_KEY, session)
        try:
            return plain(*args, **kwargs)
        finally:
            # The thread's end, when it has no interpreter any more, must not be what drops the session.
            core._stash_obj_in_tls(_KEY, before)

    for module in (torch.autograd, torch.autograd.graph):
        if getattr(module, "_engine_run_backward", None) is plain:
            module._engine_run_backward = engine_run_backward

    def look_up() -> SessionState | None:
        if not core._is_key_in_tls(_KEY):
            return None
        session: SessionState | None = core._get_obj_in_tls(_KEY)
        return session

    look_up_foreign_threads(look_up)


def install_autograd_threads() -> None:
    """Patch PyTorch once it is imported."""
    after_import("torch", _patch_autograd)
