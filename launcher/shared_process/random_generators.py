"""Random generators of Python, NumPy (its legacy generator) and PyTorch: each session draws from its own.

PyTorch has one for the CPU and one for each GPU. All code that draws random numbers without a given generator ends in
an operator that PyTorch tags as `nondeterministic_seeded`: dropout, initializers, samplers, recurrent layers, C++ code.
The kernels of these operators are overridden: those that take a generator get the session's, the others run with
the session's state in the default generator.
"""

import logging
import random
import threading
import warnings
from collections.abc import Callable
from functools import update_wrapper
from types import ModuleType
from typing import Any, Final

from muri.launcher.job.script import after_import
from muri.launcher.shared_process.state import (
    PerSession,
    SessionState,
    add_properties,
    by_session,
    current_session,
    enter_session,
)

logger = logging.getLogger("muri.launcher")

_PLAIN: random.Random = random._inst
_DEVICES: Final = ("CPU", "CUDA")
_WITHOUT_DRAWING: Final = ("_backward", "_fused_sdp_choice", "_fill_mem_eff_dropout_mask_")
"""Operators with the tag that draw nothing from the default generator."""

_generators: PerSession[random.Random] = PerSession(random.Random)


class SessionRandom(random.Random):
    """Replaces `random._inst`, which some libraries use."""

    def __getattribute__(self, name: str) -> Any:
        session = current_session()
        return getattr(_PLAIN if session is None else _generators.of(session), name)


def install_python_random() -> None:
    """Replace the functions and the instance that they are methods of."""
    for name, function in list(vars(random).items()):
        if getattr(function, "__self__", None) is _PLAIN:
            setattr(random, name, by_session(function, _generators))
    random._inst = SessionRandom()


def _session_class(plain: Any, generators: PerSession[Any]) -> type:
    def read(_self: object, name: str) -> Any:
        session = current_session()
        return getattr(plain if session is None else generators.of(session), name)

    return type("SessionRandomState", (type(plain),), {"__getattribute__": read})


def _patch_numpy(numpy_random: ModuleType) -> None:
    mtrand = numpy_random.mtrand
    plain = mtrand._rand
    generators: PerSession[Any] = PerSession(type(plain))
    stand_in = _session_class(plain, generators)()

    def seed(seed: Any = None) -> None:
        """Reseed the legacy generator; see numpy.random.RandomState.seed."""
        stand_in.seed(seed)

    def get_bit_generator() -> Any:
        """The bit generator of the legacy generator."""
        return stand_in._bit_generator

    def set_bit_generator(bitgen: Any) -> None:
        """Give the legacy generator another bit generator."""
        session = current_session()
        if session is None:
            plain_set(bitgen)
        else:
            generators.put(session, type(plain)(bitgen))

    plain_set: Any = getattr(mtrand, "set_bit_generator", None)
    replaced = {"seed": seed, "get_bit_generator": get_bit_generator, "set_bit_generator": set_bit_generator}
    for module in (mtrand, numpy_random):
        for name, function in list(vars(module).items()):
            if name in replaced:
                setattr(module, name, replaced[name])
            elif getattr(function, "__self__", None) is plain:
                setattr(module, name, by_session(function, generators))
    mtrand._rand = stand_in


def install_numpy_random() -> None:
    """Patch NumPy once it is imported."""
    after_import("numpy.random", _patch_numpy)


_libraries: Final[list[Any]] = []


class SessionGenerators:
    """The generators of every session."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._cpu: PerSession[Any] = PerSession(lambda: self._fresh("cpu"))
        self._gpus: PerSession[dict[int, Any]] = PerSession(dict)
        self._plain_cpu = torch.default_generator
        self._local = threading.local()
        self._exchange = threading.Lock()

    def _fresh(self, device: str) -> Any:
        generator = self._torch.Generator(device=device)
        generator.seed()  # as a fresh process does; a new Generator has a fixed seed
        return generator

    def cpu(self) -> Any:
        """The calling thread's generator for the CPU."""
        session = current_session()
        return self._plain_cpu if session is None else self._cpu.of(session)

    def gpus(self, plain: tuple[Any, ...]) -> tuple[Any, ...]:
        """The calling thread's generators for the GPUs.

        Args:
            plain: The process's generators, empty as long as CUDA was not initialized.
        """
        session = current_session()
        if session is None:
            return plain
        return tuple(self._of_gpu(session, index) for index in range(len(plain)))

    def _of_gpu(self, session: SessionState, index: int) -> Any:
        own = self._gpus.of(session)
        if index not in own:
            own[index] = self._fresh(f"cuda:{index}")
        return own[index]

    def of(self, session: SessionState, tensor: Any, device: str) -> Any:
        """A session's generator for the device of an operator's argument."""
        if device == "CPU":
            return self._cpu.of(session)
        index = getattr(getattr(tensor, "device", None), "index", None)
        return self._of_gpu(session, self._torch.cuda.current_device() if index is None else index)

    def giving(self, kernel: Any, device: str) -> Callable[..., Any]:
        """A kernel that passes the session's generator on."""
        call, local = kernel.call_boxed, self._local

        def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("generator") is None:
                session = current_session()
                if session is not None and not getattr(local, "exchanged", False):
                    kwargs["generator"] = self.of(session, args[0] if args else None, device)
            return call(keyset, *args, **kwargs)

        return run

    def exchanging(self, kernel: Any, device: str, dropout_at: int | None) -> Callable[..., Any]:
        """A kernel that finds the session's state in the default generator.

        Args:
            kernel: The plain kernel, which takes no generator.
            device: Where it runs.
            dropout_at: Position of its probability of dropout; with 0 it draws nothing.
        """
        call, local = kernel.call_boxed, self._local

        def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            session = current_session()
            draws = dropout_at is None or len(args) <= dropout_at or args[dropout_at] != 0
            if session is None or not draws or getattr(local, "exchanged", False):
                return call(keyset, *args, **kwargs)
            own = self.of(session, args[0], device)
            shared = self._plain_cpu if device == "CPU" else self._shared_gpu(own.device.index)
            with self._exchange:
                local.exchanged = True
                try:
                    shared.set_state(own.get_state())
                    result = call(keyset, *args, **kwargs)
                    own.set_state(shared.get_state())
                finally:
                    local.exchanged = False
            return result

        return run

    def _shared_gpu(self, index: int) -> Any:
        return self._torch.cuda.__dict__["default_generators"][index]


def _argument_names(schema: Any) -> list[str]:
    return [argument.name for argument in schema.arguments]


def _override(torch: ModuleType, generators: SessionGenerators) -> None:
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)  # PyTorch removes the kernels when the library object is freed
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, overload = name.partition("::")
        if namespace != "aten" or any(part in overload for part in _WITHOUT_DRAWING):
            continue
        base, _, variant = overload.partition(".")
        operator = getattr(getattr(torch.ops.aten, base), variant or "default")
        if torch.Tag.nondeterministic_seeded not in operator.tags:
            continue
        names = _argument_names(operator._schema)
        dropout_at = next((i for i, n in enumerate(names) if n in {"dropout_p", "dropout"}), None)
        for device in _DEVICES:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(name, device):
                continue
            kernel = torch.library.get_kernel(name, device)
            if "generator" in names:
                library.impl(overload, generators.giving(kernel, device), device, with_keyset=True)
            else:
                library.impl(overload, generators.exchanging(kernel, device, dropout_at), device, with_keyset=True)


def _patch_functions(torch: ModuleType, generators: SessionGenerators) -> None:
    plain_seed, plain_manual_seed = torch.random.seed, torch.random.manual_seed

    def manual_seed(seed: Any) -> Any:
        plain_manual_seed(
            seed
        )  # other devices, and the check of the value; no session draws from the process's generator
        return generators.cpu().manual_seed(int(seed))

    def seed() -> int:
        value: int = plain_seed()
        generators.cpu().manual_seed(value)
        return value

    def get_rng_state() -> Any:
        return generators.cpu().get_state()

    def set_rng_state(new_state: Any) -> None:
        generators.cpu().set_state(new_state)

    def initial_seed() -> int:
        value: int = generators.cpu().initial_seed()
        return value

    for function in (manual_seed, seed, get_rng_state, set_rng_state, initial_seed):
        update_wrapper(function, getattr(torch.random, function.__name__))
        for module in (torch, torch.random):
            setattr(module, function.__name__, function)
    default = property(lambda _module: generators.cpu())
    for module in (torch, torch.random):
        add_properties(module, {"default_generator": default})


def _patch_cuda(cuda: ModuleType, generators: SessionGenerators) -> None:
    def get(module: ModuleType) -> tuple[Any, ...]:
        return generators.gpus(module.__dict__["default_generators"])

    def put(module: ModuleType, value: tuple[Any, ...]) -> None:
        module.__dict__["default_generators"] = value

    add_properties(cuda, {"default_generators": property(get, put)})
    plain_lazy_call = cuda.random._lazy_call

    def lazy_call(function: Callable[[], None], **options: Any) -> None:
        """Run calls that wait for CUDA's initialization in the session that asked for them."""
        session = current_session()

        def run() -> None:
            before = current_session()
            enter_session(session)
            try:
                function()
            finally:
                enter_session(before)

        plain_lazy_call(run, **options)

    cuda.random._lazy_call = lazy_call


def _patch_torch(torch: ModuleType) -> None:
    if not hasattr(torch.library, "get_kernel"):
        logger.warning(
            "PyTorch %s has no torch.library.get_kernel: its random generators are shared by the members of the group. "
            "Results differ from run to run; install a newer PyTorch, or submit with --muri=alone=1 what must repeat",
            torch.__version__,
        )
        return
    generators = SessionGenerators(torch)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*verriding a previously registered kernel")
        _override(torch, generators)
    _patch_functions(torch, generators)
    _patch_cuda(torch.cuda, generators)


def install_torch_random() -> None:
    """Patch PyTorch once it is imported."""
    after_import("torch", _patch_torch)
