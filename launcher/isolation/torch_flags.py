"""PyTorch's switches that stand once per process in C++: deterministic mode, cuDNN, matmul precision, anomalies.

They steer work on the GPU (some also on the CPU), so a session's values are put in place when it gains the
resource `propagate`. What it runs outside of that stage runs with the values of whoever had the resource last.
"""

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from muri.launcher.context import PerSession, SessionState, current_session
from muri.launcher.isolation.import_hooks import after_import

Getter = Callable[[], Any]
Setter = Callable[[Any], Any]

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


class Flags:
    """What each session has set, and whose values are in place."""

    def __init__(self) -> None:
        self.used = False
        self._lock = threading.RLock()
        self._getters: dict[str, Getter] = {}
        self._setters: dict[str, Setter] = {}
        self._defaults: dict[str, Any] = {}
        self._own: PerSession[dict[str, Any]] = PerSession(self._defaults.copy)
        self._holder: SessionState | None = None

    def add(self, name: str, get: Getter, put: Setter) -> tuple[Getter, Setter]:
        """Take a flag under care.

        Returns:
            The getter and the setter to put in place of the process's.
        """
        self._getters[name], self._setters[name], self._defaults[name] = get, put, get()

        def session_get() -> Any:
            session = current_session()
            if session is None:
                return get()
            with self._lock:  # another session may be about to put its values in place
                return get() if session is self._holder else self._own.of(session)[name]

        def session_set(value: Any) -> None:
            session = current_session()
            if session is None:
                put(value)
                self._defaults[name] = get()
                return
            with self._lock:
                self.used = True
                if self._holder is None:
                    self.put_in_place(session)
                if self._holder is session:
                    put(value)
                else:  # another one computes; it counts when this session gains the resource
                    self._own.of(session)[name] = value

        return session_get, session_set

    def put_in_place(self, session: SessionState) -> None:
        """Make the session's values count."""
        with self._lock:
            if self._holder is session:
                return
            present = {name: get() for name, get in self._getters.items()}
            if self._holder is not None:
                self._own.put(self._holder, present)
            self._apply(present, self._own.of(session))
            self._holder = session

    def forget(self, session: SessionState) -> None:
        """A session ended: its values go."""
        with self._lock:
            if self._holder is session:
                self._apply({name: get() for name, get in self._getters.items()}, self._defaults)
                self._holder = None

    def _apply(self, present: dict[str, Any], wanted: dict[str, Any]) -> None:
        for name, put in self._setters.items():
            if present[name] != wanted[name]:
                put(wanted[name])


_flags: Final = Flags()


def on_propagate(session: SessionState) -> None:
    """A session gained the resource `propagate`: its switches count from now on."""
    if _flags.used:
        _flags.put_in_place(session)


def _patch_flags(torch: Any) -> None:
    core, replaced = torch._C, dict[Any, Any]()
    for getter, setter in _BY_NAME:
        plain_get, plain_set = getattr(core, getter, None), getattr(core, setter, None)
        if plain_get is not None and plain_set is not None:
            replaced[plain_get], replaced[plain_set] = _flags.add(getter, plain_get, plain_set)
            setattr(core, getter, replaced[plain_get])
            setattr(core, setter, replaced[plain_set])
    _patch_backends(torch.backends, replaced)
    _patch_deterministic(core)
    _patch_anomaly(torch)
    torch._tensor_str.PRINT_OPTS = _PrintOptions(torch._tensor_str.PRINT_OPTS)


def _patch_backends(backends: ModuleType, replaced: dict[Any, Any]) -> None:
    """Properties such as `torch.backends.cudnn.benchmark` have kept the plain functions."""
    for module in list(vars(backends).values()):
        for attribute in vars(type(module)).values() if isinstance(module, ModuleType) else ():
            for name in ("getter", "setter"):
                plain = getattr(attribute, name, None) if type(attribute).__name__ == "ContextProp" else None
                if plain in replaced:
                    setattr(attribute, name, replaced[plain])


def _patch_deterministic(core: Any) -> None:
    plain_set = core._set_deterministic_algorithms
    enabled, warn_only = core._get_deterministic_algorithms, core._get_deterministic_algorithms_warn_only
    get, put = _flags.add(
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
    get, put = _flags.add("anomaly", lambda: (enabled(), check_nan()), lambda mode: put_plain(*mode))
    torch.set_anomaly_enabled = lambda mode, check_nan=True: put((bool(mode), bool(check_nan)))
    torch.is_anomaly_enabled = lambda: get()[0]
    torch.is_anomaly_check_nan_enabled = lambda: get()[1]


class _PrintOptions:
    """Stands for the object with PyTorch's print options."""

    def __init__(self, plain: Any) -> None:
        self.__dict__["_plain"] = plain
        self.__dict__["_own"] = PerSession(type(plain))

    def _target(self) -> Any:
        session = current_session()
        return self._plain if session is None else self._own.of(session)

    def __getattr__(self, name: str) -> Any:
        """Read an option of the session."""
        return getattr(self._target(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an option of the session."""
        setattr(self._target(), name, value)


def forget_torch_flags(session: SessionState) -> None:
    """A session ended."""
    _flags.forget(session)


def install_torch_flags() -> None:
    """Patch PyTorch once it is imported."""
    after_import("torch", _patch_flags)
