"""How many threads PyTorch uses within an operation: each session's own number, in all its threads.

OpenMP keeps the number per thread and MKL can; PyTorch's own variable serves threads that start later.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from muri.launcher.context import PerSession, SessionState, current_session
from muri.launcher.isolation.import_hooks import after_import
from muri.launcher.isolation.threads import at_thread_start

_counts: PerSession[dict[str, int]] = PerSession(dict)
_apply: Final[list[Callable[[SessionState], None]]] = []


def _mkl_local_setter(torch: Any) -> Callable[[int], Any]:
    """MKL's number for the calling thread only; without MKL nothing."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        setter: Callable[[int], Any] = library.MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return lambda _count: None
    return setter


def _count_of_environment(session: SessionState, default: int) -> int:
    for name in (b"OMP_NUM_THREADS", b"MKL_NUM_THREADS"):
        value = session.environment.get(name, b"").split(b",")[0]
        if value.isdigit() and int(value) > 0:
            return int(value)
    return default


def _patch_thread_counts(torch: Any) -> None:
    plain_set, default = torch.set_num_threads, torch.get_num_threads()
    set_mkl_local = _mkl_local_setter(torch)

    def apply(session: SessionState) -> None:
        own = _counts.of(session)
        count = own.setdefault("intra_op", _count_of_environment(session, default))
        if torch.get_num_threads() != count:
            plain_set(count)
        set_mkl_local(count)

    def set_num_threads(num: int, /) -> None:
        session = current_session()
        torch.get_num_threads()  # a thread's first use would take over what another member has set
        plain_set(num)
        if session is not None:
            _counts.of(session)["intra_op"] = int(num)
            set_mkl_local(int(num))

    set_num_threads.__doc__ = plain_set.__doc__
    torch.set_num_threads = set_num_threads
    _patch_interop(torch)
    _apply.append(apply)
    if (session := current_session()) is not None:
        apply(session)


def _patch_interop(torch: Any) -> None:
    """PyTorch takes this number once per process; a second member must not fail for it."""
    plain_set, plain_get = torch.set_num_interop_threads, torch.get_num_interop_threads

    def set_num_interop_threads(num: int, /) -> None:
        session = current_session()
        if session is None:
            plain_set(num)
        elif not isinstance(num, int) or num <= 0:
            raise RuntimeError("set_num_interop_threads expects a positive integer")
        else:
            _counts.of(session)["inter_op"] = num

    def get_num_interop_threads() -> int:
        session = current_session()
        return int(plain_get() if session is None else _counts.of(session).get("inter_op", plain_get()))

    torch.set_num_interop_threads, torch.get_num_interop_threads = set_num_interop_threads, get_num_interop_threads


def use_own_count(session: SessionState) -> None:
    """Make the session's number count in the calling thread."""
    for apply in _apply:
        apply(session)


def install_torch_threads() -> None:
    """Patch PyTorch once it is imported."""
    after_import("torch", _patch_thread_counts)
    at_thread_start(use_own_count)
