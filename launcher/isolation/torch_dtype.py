"""`torch.set_default_dtype` per session.

The default stands in one place in C++. It stays float32 there. A session that sets another gets a mode in each
of its threads that adds the dtype to the functions that make tensors. Not reached: the legacy constructors
(`torch.Tensor(3, 4)`), results of integer division and the like, threads that ran before, code in C++.
"""

from collections.abc import Callable
from typing import Any, Final

from muri.launcher.context import PerSession, SessionState, current_session
from muri.launcher.isolation.import_hooks import after_import
from muri.launcher.isolation.threads import at_thread_start

_ALWAYS_DEFAULT: Final = (
    *("zeros", "ones", "empty", "rand", "randn", "eye", "linspace", "logspace", "empty_strided", "empty_permuted"),
    *("normal", "hann_window", "hamming_window", "bartlett_window", "blackman_window", "kaiser_window"),
)
"""Functions whose result has the default dtype if none is given."""

_FROM_VALUES: Final = ("tensor", "as_tensor", "asarray", "full", "arange", "range", "scalar_tensor")
"""Functions whose result has the default dtype if the values are Python's floats."""

_COMPLEX: Final = {"float64": "complex128", "float32": "complex64", "float16": "complex32", "bfloat16": "complex64"}

_chosen: PerSession[dict[str, Any]] = PerSession(dict)


class _DefaultDtype:
    """The functions that replace PyTorch's, and the mode."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self._plain_set, self._plain_get = torch.set_default_dtype, torch.get_default_dtype
        self._plain_type = torch.set_default_tensor_type
        always = {getattr(torch, name) for name in _ALWAYS_DEFAULT if hasattr(torch, name)}
        from_values = {getattr(torch, name) for name in _FROM_VALUES if hasattr(torch, name)}
        self._mode = _make_mode(torch, always, from_values)

    def set_default_dtype(self, d: Any, /) -> None:
        """Set the default of the calling session; see torch.set_default_dtype."""
        session = current_session()
        if session is None:
            self._plain_set(d)
            return
        if not isinstance(d, self.torch.dtype):
            raise TypeError("invalid dtype object: only floating-point types are supported as the default type")
        if str(d).rpartition(".")[2] not in _COMPLEX:
            raise TypeError(f"only floating-point types are supported as the default type, but got {d}")
        _chosen.of(session)["dtype"] = d
        self.enter(session)

    def get_default_dtype(self) -> Any:
        """The default of the calling session."""
        session = current_session()
        plain = self._plain_get()
        return plain if session is None else _chosen.of(session).get("dtype", plain)

    def set_default_tensor_type(self, t: Any, /) -> None:
        """The deprecated form: types of the CPU set the dtype only."""
        kind = getattr(self.torch, t.rpartition(".")[2], None) if isinstance(t, str) else t
        if current_session() is None or "cuda" in str(t):
            self._plain_type(t)
        else:
            self.set_default_dtype(getattr(kind, "dtype", kind))

    def enter(self, session: SessionState) -> None:
        """Put the mode under the calling thread's other modes, once."""
        if "dtype" not in _chosen.of(session):
            return
        overrides = self.torch.overrides
        modes = overrides._get_current_function_mode_stack()
        if any(isinstance(mode, self._mode) for mode in modes):
            return
        popped = []
        # PyTorch's mode for the default device expects to be the lowest.
        while modes and type(modes[-1]).__name__ != "DeviceContext":
            popped.append(overrides._pop_mode())
            modes = modes[:-1]
        overrides._push_mode(self._mode())
        for mode in reversed(popped):
            overrides._push_mode(mode)

    def leave(self) -> None:
        """Take the script's modes off the calling thread: at its end PyTorch could not drop them in order."""
        while self.torch.overrides._get_current_function_mode_stack():
            self.torch.overrides._pop_mode()


def _make_mode(torch: Any, always: set[Any], from_values: set[Any]) -> type:
    base: type = torch.overrides.TorchFunctionMode

    def handle(_self: Any, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        session = current_session()
        dtype = None if session is None else _chosen.of(session).get("dtype")
        if dtype is None or kwargs.get("dtype") is not None:
            return func(*args, **kwargs)
        if func in always and not _has_tensor(torch, args):
            return func(*args, **{**kwargs, "dtype": dtype})
        result = func(*args, **kwargs)
        if func not in from_values or (args and hasattr(args[0], "dtype")) or kwargs.get("out") is not None:
            return result
        if result.dtype == torch.float32:
            return func(*args, **{**kwargs, "dtype": dtype})
        if result.dtype == torch.complex64:
            return func(*args, **{**kwargs, "dtype": getattr(torch, _COMPLEX[str(dtype).rpartition(".")[2]])})
        return result

    return type("DefaultDtypeMode", (base,), {"__torch_function__": handle})


def _has_tensor(torch: Any, args: tuple[Any, ...]) -> bool:
    return any(isinstance(argument, torch.Tensor) for argument in args)


_patches: Final[list[_DefaultDtype]] = []


def _patch_default_dtype(torch: Any) -> None:
    patch = _DefaultDtype(torch)
    _patches.append(patch)
    torch.set_default_dtype = patch.set_default_dtype
    torch.get_default_dtype = patch.get_default_dtype
    torch.set_default_tensor_type = patch.set_default_tensor_type


def _enter_in_thread(session: SessionState) -> None:
    for patch in _patches:
        patch.enter(session)


def forget_default_dtype(_session: SessionState) -> None:
    """Called in the session's first thread at its end."""
    for patch in _patches:
        patch.leave()


def install_default_dtype() -> None:
    """Patch PyTorch once it is imported."""
    after_import("torch", _patch_default_dtype)
    at_thread_start(_enter_in_thread)
