"""PyTorch's settings per session: switches in C++, number of threads within an operation.

The switches (deterministic mode, cuDNN, matmul precision, anomalies) steer work on the GPU, some also on the CPU, so a
session's values take effect when it gains the resource `propagate`. Work outside of that stage runs with the values of
the session that had the resource last.

OpenMP keeps the number of threads per thread, and so can MKL; PyTorch's own variable serves threads that start later.
"""

import ctypes
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from muri.launcher.shared_process.state import PerSession, SessionState, StandIn, current_session, in_session, own_or
from muri.launcher.shared_process.threads_and_processes import at_thread_start

_BY_NAME: Final = (
    ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ("_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32"),
    ("_get_cublas_allow_tf32", "_set_cublas_allow_tf32"),
    ("_get_float32_matmul_precision", "_set_float32_matmul_precision"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
)
"""Getters and setters in torch._C; those that a PyTorch lacks are left out."""

_chosen: PerSession[dict[str, Any]] = PerSession(dict)


def forget_session(session: SessionState) -> None:
    """Drop the settings of a session that ends, in its first thread."""
    overrides: Any = sys.modules.get("torch.overrides")
    # A script's modes: at the thread's end PyTorch could not drop them in order.
    while overrides is not None and overrides._get_current_function_mode_stack():
        overrides._pop_mode()
    flags.forget(session)


Getter = Callable[[], Any]
Setter = Callable[[Any], Any]


class Flags:
    """The values that each session has set, and which session's values are in effect."""

    def __init__(self) -> None:
        self.used = False  # whether any session has set one
        self.lock = threading.RLock()  # held while values are put into effect
        self._getters: dict[str, Getter] = {}
        self._setters: dict[str, Setter] = {}
        self._defaults: dict[str, Any] = {}
        self._own: PerSession[dict[str, Any]] = PerSession(self._defaults.copy)
        self._holder: SessionState | None = None

    def add(self, name: str, get: Getter, put: Setter) -> tuple[Getter, Setter]:
        """Manage a flag; return the getter and the setter to put in place of the process's."""
        self._getters[name], self._setters[name], self._defaults[name] = get, put, get()

        def plain_set(value: Any) -> None:
            put(value)
            self._defaults[name] = get()

        @in_session(get)
        def session_get(session: SessionState) -> Any:
            with self.lock:  # another session may be setting its values
                return get() if session is self._holder else self._own.of(session)[name]

        @in_session(plain_set)
        def session_set(session: SessionState, value: Any) -> None:
            with self.lock:
                self.used = True
                if self._holder is None:
                    self.put_in_place(session)
                if self._holder is session:
                    put(value)
                else:  # another session computes; the value takes effect when this one gains the resource
                    self._own.of(session)[name] = value

        return session_get, session_set

    def put_in_place(self, session: SessionState) -> None:
        """Put the session's values into effect."""
        with self.lock:
            if self._holder is session:
                return
            session.hold_back()  # half of them would stay in effect for another member
            try:
                present = {name: get() for name, get in self._getters.items()}
                if self._holder is not None:
                    self._own.put(self._holder, present)
                self._apply(present, self._own.of(session))
                self._holder = session
            finally:
                session.let_through()

    def forget(self, session: SessionState) -> None:
        """Drop the values of a session that ended."""
        with self.lock:
            if self._holder is session:
                self._apply({name: get() for name, get in self._getters.items()}, self._defaults)
                self._holder = None

    def _apply(self, present: dict[str, Any], wanted: dict[str, Any]) -> None:
        for name, put in self._setters.items():
            if present[name] != wanted[name]:
                put(wanted[name])


flags: Final = Flags()


def apply_torch_flags(session: SessionState) -> None:
    """Put the switches of a session into effect, when it gains the resource `propagate`."""
    if flags.used:
        flags.put_in_place(session)


def patch_flags(torch: Any) -> None:
    """Give each session its switches of PyTorch, and options for printing."""
    core, replaced = torch._C, dict[Any, Any]()
    for getter, setter in _BY_NAME:
        plain_get, plain_set = getattr(core, getter, None), getattr(core, setter, None)
        if plain_get is not None and plain_set is not None:
            replaced[plain_get], replaced[plain_set] = flags.add(getter, plain_get, plain_set)
            setattr(core, getter, replaced[plain_get])
            setattr(core, setter, replaced[plain_set])
    # Properties such as `torch.backends.cudnn.benchmark` have kept the plain functions.
    for module in list(vars(torch.backends).values()):
        for attribute in vars(type(module)).values() if isinstance(module, ModuleType) else ():
            for name in ("getter", "setter"):
                plain = getattr(attribute, name, None) if type(attribute).__name__ == "ContextProp" else None
                if plain in replaced:
                    setattr(attribute, name, replaced[plain])
    _patch_deterministic(core)
    _patch_anomaly(torch)
    options = torch._tensor_str.PRINT_OPTS
    # PyTorch reads them by `dataclasses.asdict`, which looks at the class.
    fields = {"__dataclass_fields__": getattr(options, "__dataclass_fields__", {})}
    stand_in = type("PrintOptions", (StandIn,), fields)
    torch._tensor_str.PRINT_OPTS = stand_in(own_or(options, PerSession(type(options))))


def _patch_deterministic(core: Any) -> None:
    plain_set = core._set_deterministic_algorithms
    enabled, warn_only = core._get_deterministic_algorithms, core._get_deterministic_algorithms_warn_only
    get, put = flags.add(
        "deterministic",
        lambda: (enabled(), warn_only()),
        lambda mode: plain_set(mode[0], warn_only=mode[1]),
    )
    core._set_deterministic_algorithms = lambda mode, *, warn_only=False: put((bool(mode), bool(warn_only)))
    core._get_deterministic_algorithms = lambda: get()[0]
    core._get_deterministic_algorithms_warn_only = lambda: get()[1]


def _patch_anomaly(torch: Any) -> None:
    put_plain = torch.set_anomaly_enabled
    enabled, check_nan = torch.is_anomaly_enabled, torch.is_anomaly_check_nan_enabled
    get, put = flags.add("anomaly", lambda: (enabled(), check_nan()), lambda mode: put_plain(*mode))
    torch.set_anomaly_enabled = lambda mode, check_nan=True: put((bool(mode), bool(check_nan)))
    torch.is_anomaly_enabled = lambda: get()[0]
    torch.is_anomaly_check_nan_enabled = lambda: get()[1]


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
    _patch_interop(torch)
    at_thread_start(apply)
    if (session := current_session()) is not None:
        apply(session)


def _patch_interop(torch: Any) -> None:
    """Accept this number from each member: PyTorch takes it once per process, and a second member must not fail."""
    plain_get = torch.get_num_interop_threads

    @in_session(torch.set_num_interop_threads)
    def set_num_interop_threads(session: SessionState, num: int, /) -> None:
        if not isinstance(num, int) or num <= 0:
            raise RuntimeError("set_num_interop_threads expects a positive integer")
        _chosen.of(session)["inter_op"] = num

    torch.set_num_interop_threads = set_num_interop_threads
    torch.get_num_interop_threads = in_session(plain_get)(lambda own: _chosen.of(own).get("inter_op", plain_get()))
