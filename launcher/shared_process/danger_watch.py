"""Notes the acts of a script that threads of one process could not keep apart, while a dry run measures it.

Python's audit events tell of processes, the environment and C libraries; at the end the modules, threads and settings
of the process are looked at. `muri.profiler.records` says what the names mean, docs/sharing.md what follows.
"""

from __future__ import annotations

import functools
import gc
import locale
import logging
import os
import random
import resource
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any, Final

from muri.launcher.job.environment import name_as_muris_own, task_of
from muri.launcher.job.script import after_import

KNOWN: Final = frozenset(
    {
        "PIL", "_distutils_hack", "dill", "filelock", "fsspec", "functorch", "jinja2", "markupsafe", "mpmath", "muri",
        "networkx", "numpy", "nvidia", "packaging", "pkg_resources", "pynvml", "setuptools", "six", "sympy", "tabulate",
        "torch", "torchgen", "torchvision", "tqdm", "triton", "typing_extensions",
    }
)  # fmt: skip
"""Packages of which threads may share one copy: PyTorch, its imports, and images."""

MOST_HELD: Final = 0.1
"""Above this share of the time with the interpreter's lock held, a script is a danger. Two loops that held it for 15 %
got on as well in threads as in processes, two that held it for 40 % half as well."""

LEAST_LOOKS: Final = 30
"""With fewer looks at the lock nothing is known."""

CALLS: Final = {
    "multiprocessing.set_start_method": "children",
    "torch.compile": "compile",
    "torch.distributed.distributed_c10d.init_process_group": "ranks",
    "torch.distributed.init_process_group": "ranks",
    "logging.captureWarnings": "settings",
    "numpy.random.set_bit_generator": "settings",
    "resource.prlimit": "settings",
    "resource.setrlimit": "settings",
    "socket.setdefaulttimeout": "settings",
    "sys.setrecursionlimit": "settings",
    "torch.set_default_dtype": "settings",
    "torch.set_default_tensor_type": "settings",
    "torch.set_num_interop_threads": "settings",
    "os.kill": "signals",
    "os.killpg": "signals",
    "signal.alarm": "signals",
    "signal.getsignal": "signals",
    "signal.pthread_kill": "signals",
    "signal.raise_signal": "signals",
    "signal.setitimer": "signals",
    "signal.signal": "signals",
}
"""Functions that a script in a thread must not call, and the danger that each is."""

_LOOK_S: Final = 0.005

_CHILDREN: Final = frozenset(
    {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen"}
)
_VARIABLES: Final = frozenset({"os.putenv", "os.unsetenv"})
_HOOKABLE: Final = (
    ("builtins", ""), ("os", ""), ("random", ""), ("sys", ""), ("threading", ""), ("warnings", ""), ("numpy", ""),
    ("numpy.random", ""), ("torch", ""), ("torch", "Tensor"), ("torch.nn", "Module"), ("torch.nn.functional", ""),
    ("torch.optim", "Optimizer"),
)  # fmt: skip
"""Modules, and classes in them, whose functions scripts replace."""

_SWITCHES: Final = (
    ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ("_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32"),
    ("_get_cublas_allow_tf32", "_set_cublas_allow_tf32"),
    ("_get_float32_matmul_precision", "_set_float32_matmul_precision"),
    ("_get_fp32_precision_getter", "_set_fp32_precision_setter"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_deterministic_algorithms", "_set_deterministic_algorithms"),
)
"""Getters and setters in torch._C; those that a PyTorch lacks are left out."""


class LockWatch:
    """How often the interpreter's lock is taken when a thread wakes up and wants it.

    The thread sleeps, which is one voluntary switch of the kernel, and then needs the lock: if another thread has it,
    it sleeps once more. So the count of switches tells, not how late the thread is. On busy cores a script that is
    interrupted while it has the lock has it for longer: that can only make a danger where there is none.
    """

    def __init__(self) -> None:
        self._looks = 0
        self._held = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="interpreter-lock", daemon=True)
        self._thread.start()

    @property
    def share(self) -> float | None:
        """Share of the looks at which the lock was taken; None while there are too few of them."""
        return self._held / self._looks if self._looks >= LEAST_LOOKS else None

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()
        self._thread.join()

    def _look(self) -> None:
        name_as_muris_own()
        chance = random.Random(0)  # noqa: S311 -- so that no loop keeps in step with it
        before = _switches()
        while not self._stopped.wait(_LOOK_S * (0.5 + chance.random())):
            self._held += _switches() - before > 1
            self._looks += 1
            before = _switches()


def _switches() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class DangerWatch:
    """Notes dangers from its creation on, before the script's first line; its own modules are in `own_directory`."""

    def __init__(self, own_directory: str) -> None:
        self._own = Path(own_directory).resolve()
        self._noted: set[str] = set()
        self._before = frozenset(sys.modules)
        self._path = list(sys.path)
        self._settings = _settings()
        self._patched_before = [function for function in _functions() if _is_patched(function)]
        self._lock: LockWatch | None = None
        sys.addaudithook(self._hear)
        after_import("torch._dynamo", _hide_from)
        for name, danger in CALLS.items():
            note = self._note_if_foreign if danger == "signals" else self._noted.add
            watch_calls(name, functools.partial(note, danger))
        note_setting = functools.partial(self._noted.add, "settings")
        after_import("torch", lambda torch: before_switches_change(torch, note_setting))

    def watch_lock(self) -> None:
        """Begin to look at the interpreter's lock: the script's first iteration is over."""
        if self._lock is None:
            self._lock = LockWatch()

    def found(self) -> tuple[str, ...]:
        """Return the names of all dangers so far, sorted; the lock is looked at no more."""
        if self._lock is not None:
            self._lock.stop()
        share = None if self._lock is None else self._lock.share
        if share is None or share > MOST_HELD:
            self._noted.add("interpreter")
        self._noted.update(name for name, seen in self._seen().items() if seen)
        return tuple(sorted(self._noted))

    def _hear(self, event: str, _arguments: tuple[Any, ...]) -> None:
        if event in _CHILDREN:
            self._noted.add("children")
        elif event in _VARIABLES:
            self._note_if_foreign("environment")
        elif event == "ctypes.dlopen":
            self._note_if_foreign("native")

    def _note_if_foreign(self, danger: str) -> None:
        """Note what the script or a package does, but not what PyTorch and the like do by themselves."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        while frame is not None and _is_stdlib(frame.f_code.co_filename):
            if frame.f_code.co_name == "<module>":
                return  # the import of one of Python's own modules
            frame = frame.f_back
        if frame is not None and _top(frame.f_globals.get("__name__")) not in KNOWN:
            self._noted.add(danger)

    def _seen(self) -> dict[str, bool]:
        """Return whether the process shows each danger now."""
        foreign = list(self._foreign_files())
        ended_children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0
        children = ended_children or bool(getattr(sys.modules.get("multiprocessing.process"), "_children", ()))
        return {
            "accelerate": "accelerate" in sys.modules or "transformers" in sys.modules,
            "children": children or _loader_has_workers(),
            "native": any(file.endswith(tuple(EXTENSION_SUFFIXES)) for file in foreign),
            "packages": any(self._own not in Path(file).resolve().parents for file in foreign),
            "patches": any(_is_patched(one) and one not in self._patched_before for one in _functions()),
            "paths": sys.path != self._path,
            "ranks": task_of(os.environ)[1] > 1,
            "settings": _settings() != self._settings,
            "threads": any(map(_is_scripts, threading.enumerate())),
        }

    def _foreign_files(self) -> Iterator[str]:
        """Yield the files of all modules that belong neither to Python nor to the known packages."""
        for name, module in list(sys.modules.items()):
            file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
            top = _top(name)
            if isinstance(file, str) and name not in self._before and top not in KNOWN and not _is_stdlib(file):
                yield file


def _hide_from(compiler: ModuleType) -> None:
    """Keep torch.compile from looking at the audit hook, which Python calls in the midst of compiled code."""
    skip = getattr(compiler.eval_frame, "skip_code", None)
    if skip is not None:
        for hook in (DangerWatch._hear, DangerWatch._note_if_foreign, _is_stdlib.__wrapped__, _top):
            skip(hook.__code__)


def watch_calls(function: str, note: Callable[[], None]) -> None:
    """Let a function of a module, given by its full name, call another one first."""
    module, _, name = function.rpartition(".")
    after_import(module, lambda owner: call_first(owner, name, note))


def call_first(owner: Any, name: str, note: Callable[[], None]) -> None:
    """Let a function of a module or class, which not every release may have, call another one first."""
    plain = getattr(owner, name, None)
    if plain is None:
        return

    @functools.wraps(plain)
    def noting(*arguments: Any, **keywords: Any) -> Any:
        note()
        return plain(*arguments, **keywords)

    setattr(owner, name, noting)


def before_switches_change(torch: Any, act: Callable[[], None]) -> None:
    """Call a function in a thread that is about to give a switch of PyTorch another value."""
    core = torch._C
    replaced: dict[Any, Any] = {}
    for getter, setter in _SWITCHES:
        get, put = getattr(core, getter, None), getattr(core, setter, None)
        if get is not None and put is not None:
            replaced[put] = _acting_first(get, put, act)
            setattr(core, setter, replaced[put])
    # Properties such as `torch.backends.cudnn.benchmark` have kept the plain functions.
    for module in list(vars(torch.backends).values()):
        for attribute in vars(type(module)).values() if isinstance(module, ModuleType) else ():
            if type(attribute).__name__ == "ContextProp":
                attribute.setter = replaced.get(attribute.setter, attribute.setter)
    set_anomaly = torch.set_anomaly_enabled

    def set_anomaly_enabled(mode: bool, check_nan: bool = True) -> None:
        if mode:
            act()
        set_anomaly(mode, check_nan)

    torch.set_anomaly_enabled = set_anomaly_enabled


def _acting_first(get: Callable[..., Any], put: Callable[..., Any], act: Callable[[], None]) -> Callable[..., Any]:
    """Return a setter that acts before it changes the value, its last argument by position."""

    def put_after_act(*arguments: Any, **options: Any) -> Any:
        if get(*arguments[:-1]) != arguments[-1] or any(options.values()):
            act()
        return put(*arguments, **options)

    return put_after_act


def _top(name: Any) -> str:
    return str(name or "").partition(".")[0]


_STDLIB: Final = Path(sysconfig.get_paths()["stdlib"]).resolve()


@functools.lru_cache(maxsize=None)
def _is_stdlib(file: str) -> bool:
    if file.startswith("<frozen"):
        return True
    path = Path(file).resolve()
    return _STDLIB in path.parents and not {"site-packages", "dist-packages"}.intersection(path.parts)


def _settings() -> tuple[Any, ...]:
    cores, priority = os.sched_getaffinity(os.getpid()), os.getpriority(os.PRIO_PROCESS, 0)
    python = (locale.setlocale(locale.LC_ALL), sys.getswitchinterval(), logging.root.manager.disable)
    return cores, priority, python


def _loader_has_workers() -> bool:
    """Whether there is a DataLoader with workers, also one that the script has not used yet, as for validation."""
    data = sys.modules.get("torch.utils.data")
    kind = getattr(data, "DataLoader", None)
    if not isinstance(kind, type):
        return False
    return any(issubclass(type(one), kind) and getattr(one, "num_workers", 0) for one in gc.get_objects())


def _functions() -> Iterator[Any]:
    for name, inner in _HOOKABLE:
        owner = sys.modules.get(name)
        owner = getattr(owner, inner, None) if inner else owner
        if owner is not None:
            yield from list(vars(owner).values())


def _is_patched(value: Any) -> bool:
    """Whether a function of Python or PyTorch is one of the script's or of a package."""
    if not isinstance(value, FunctionType) or _is_stdlib(value.__code__.co_filename):
        return False
    return _top(value.__globals__.get("__name__")) not in KNOWN


def _is_scripts(thread: threading.Thread) -> bool:
    """Whether a thread is one that the script has started, itself or through a package."""
    if thread is threading.main_thread() or isinstance(thread, threading._DummyThread):
        return False
    functions = (getattr(thread, "_target", None), *(getattr(thread, "_args", None) or ()))
    return not any(_top(getattr(function, "__module__", "")) == "muri" for function in functions)
