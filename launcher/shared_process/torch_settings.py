"""PyTorch's settings per session: number of threads within an operation, options for printing.

OpenMP keeps the number of threads per thread, and so can MKL; PyTorch's own variable serves threads that start later.

Its switches in C++ (deterministic mode, cuDNN, matmul precision, anomalies) exist once for all members. A script that
changes one is not fit for a thread.
"""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muri.launcher.shared_process.state import PerSession, SessionState, StandIn, current_session, own_or
from muri.launcher.shared_process.threads_and_processes import at_thread_start

_chosen: PerSession[dict[str, Any]] = PerSession(dict)


def drop_modes() -> None:
    """Drop a script's modes, in the first thread of a session that ends: at its end PyTorch could not, in order."""
    overrides: Any = sys.modules.get("torch.overrides")
    while overrides is not None and overrides._get_current_function_mode_stack():
        overrides._pop_mode()


def patch_print_options(torch: Any) -> None:
    """Give each session options for printing."""
    options = torch._tensor_str.PRINT_OPTS
    # PyTorch reads them by `dataclasses.asdict`, which looks at the class.
    fields = {"__dataclass_fields__": getattr(options, "__dataclass_fields__", {})}
    stand_in = type("PrintOptions", (StandIn,), fields)
    torch._tensor_str.PRINT_OPTS = stand_in(own_or(options, PerSession(type(options))))


def _mkl_local_setter(torch: Any) -> Callable[[int], Any]:
    """Return a function that sets MKL's number of threads for the calling thread only; without MKL it does nothing."""
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


def patch_thread_counts(torch: Any) -> None:
    """Give each session numbers of threads within an operation and between them."""
    plain_set, default = torch.set_num_threads, torch.get_num_threads()
    set_mkl_local = _mkl_local_setter(torch)

    def apply(session: SessionState) -> None:
        own = _chosen.of(session)
        count = own.setdefault("intra_op", _count_of_environment(session, default))
        if torch.get_num_threads() != count:
            plain_set(count)
        set_mkl_local(count)

    def set_num_threads(num: int, /) -> None:
        session = current_session()
        torch.get_num_threads()  # the thread's first use copies the process's number, which another member may have set
        plain_set(num)
        if session is not None:
            _chosen.of(session)["intra_op"] = int(num)
            set_mkl_local(int(num))

    set_num_threads.__doc__ = plain_set.__doc__
    torch.set_num_threads = set_num_threads
    at_thread_start(apply)
    if (session := current_session()) is not None:
        apply(session)
