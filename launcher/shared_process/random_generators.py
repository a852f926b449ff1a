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
from types import ModuleType
from typing import Any, Final

from muri.launcher.job.script import after_import
from muri.launcher.shared_process.state import (
    PerSession,
    SessionState,
    StandIn,
    add_properties,
    by_session,
    current_session,
    enter_session,
    own_or,
)

logger = logging.getLogger("muri.launcher")

_PLAIN: random.Random = random._inst
_DEVICES: Final = ("CPU", "CUDA")
_WITHOUT_DRAWING: Final = ("_backward", "_fused_sdp_choice", "_fill_mem_eff_dropout_mask_")
"""Operators with the tag that draw nothing from the default generator."""

_generators: PerSession[random.Random] = PerSession(random.Random)
_current: Final = own_or(_PLAIN, _generators)


class SessionRandom(random.Random):
    """Replaces `random._inst`, which some libraries use."""

    def __getattribute__(self, name: str) -> Any:
        return getattr(_current(), name)


def install_python_random() -> None:
    """Replace the functions and the instance that they are methods of."""
    for name, function in list(vars(random).items()):
        if getattr(function, "__self__", None) is _PLAIN:
            setattr(random, name, by_session(function, _generators))
    random._inst = SessionRandom()


def patch_numpy(numpy_random: ModuleType) -> None:
    """Give each session a legacy generator of NumPy."""
    mtrand = numpy_random.mtrand
    plain = mtrand._rand
    generators: PerSession[Any] = PerSession(type(plain))

    current = own_or(plain, generators)
    read = {"__getattribute__": lambda _self, name: getattr(current(), name)}
    for module in (mtrand, numpy_random):
        for name, function in list(vars(module).items()):
            if getattr(function, "__self__", None) is plain:
                setattr(module, name, by_session(function, generators))
    mtrand._rand = type("SessionRandomState", (type(plain),), read)()  # functions such as `seed` look it up


_libraries: Final[list[Any]] = []


class SessionGenerators:
    """The generators of every session."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._cpu: PerSession[Any] = PerSession(lambda: self._fresh("cpu"))
        self._gpus: PerSession[dict[int, Any]] = PerSession(dict)
        self._plain_cpu = torch.default_generator
        self.cpu: Final = own_or(self._plain_cpu, self._cpu)  # returns the calling thread's generator for the CPU
        self._local = threading.local()
        # Held while the process's generator is written: some kernels draw a session's numbers from it.
        self.exchange = threading.Lock()

    def _fresh(self, device: str) -> Any:
        generator = self._torch.Generator(device=device)
        generator.seed()  # as a fresh process does; a new Generator has a fixed seed
        return generator

    def gpus(self, plain: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the calling thread's generators in place of the process's, which exist once CUDA is initialized."""
        session = current_session()
        return plain if session is None else tuple(self._of_gpu(session, index) for index in range(len(plain)))

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
        """Return a kernel that passes the session's generator on."""
        call, local = kernel.call_boxed, self._local

        def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("generator") is None:
                session = current_session()
                if session is not None and not getattr(local, "exchanged", False):
                    kwargs["generator"] = self.of(session, args[0] if args else None, device)
            return call(keyset, *args, **kwargs)

        return run

    def exchanging(self, kernel: Any, device: str, dropout_at: int | None) -> Callable[..., Any]:
        """Return a kernel that finds the session's state in the default generator; the plain one takes no generator.

        With a probability of 0 for dropout, at that position of the arguments, it draws nothing.
        """
        call, local = kernel.call_boxed, self._local

        def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            session = current_session()
            draws = dropout_at is None or len(args) <= dropout_at or args[dropout_at] != 0
            if session is None or not draws or getattr(local, "exchanged", False):
                return call(keyset, *args, **kwargs)
            own = self.of(session, args[0], device)
            if device == "CPU":
                shared = self._plain_cpu
            else:
                shared = self._torch.cuda.__dict__["default_generators"][own.device.index]
            with self.exchange:
                local.exchanged = True
                try:
                    shared.set_state(own.get_state())
                    result = call(keyset, *args, **kwargs)
                    own.set_state(shared.get_state())
                finally:
                    local.exchanged = False
            return result

        return run


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
        names = [argument.name for argument in operator._schema.arguments]
        dropout_at = next((i for i, n in enumerate(names) if n in {"dropout_p", "dropout"}), None)
        for device in _DEVICES:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(name, device):
                continue
            kernel = torch.library.get_kernel(name, device)
            if "generator" in names:
                own = generators.giving(kernel, device)
            else:
                own = generators.exchanging(kernel, device, dropout_at)
            library.impl(overload, own, device, with_keyset=True)


def _patch_default(torch: ModuleType, generators: SessionGenerators) -> None:
    # The module's own functions, such as `manual_seed`, read its dictionary.
    vars(torch.random)["default_generator"] = StandIn(generators.cpu)
    for module in (torch, torch.random):
        add_properties(module, {"default_generator": property(lambda _module: generators.cpu())})


def _patch_cuda(cuda: ModuleType, generators: SessionGenerators) -> None:
    def put(module: ModuleType, value: tuple[Any, ...]) -> None:
        module.__dict__["default_generators"] = value

    own = property(lambda module: generators.gpus(module.__dict__["default_generators"]), put)
    add_properties(cuda, {"default_generators": own})
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


def _forget_default(dataset: Any) -> None:
    """Let `random_split` ask for the default generator: it has kept the process's as a default argument."""
    dataset.random_split.__defaults__ = (None,)


def patch_torch(torch: ModuleType) -> None:
    """Give each session a generator of PyTorch for the CPU and one for each GPU."""
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
    _patch_default(torch, generators)
    after_import("torch.utils.data.dataset", _forget_default)
    _patch_cuda(torch.cuda, generators)
