"""Loads a script or module as `__main__`, calls hooks after imports, and lets gloo's threads finish before Python ends.

Tells an error for lack of GPU memory from others: beside others the scheduler may be at fault for it.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import io
import os
import re
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Callable, Final

from muri.errors import UsageError
from muri.launcher.job.environment import stat_of, threads_of

_WORKER_NAME: Final = "pt_gloo_runloop"
_POLL_S: Final = 0.002
_QUIET_POLLS: Final = 3
_LIMIT_S: Final = 1.0

NAMELESS: Final = ("-c", "-")
"""Targets that are not a file: code in the next argument, code on standard input."""


class ScriptError(UsageError):
    """The script or module cannot be run."""


@dataclass(frozen=True)
class LoadedScript:
    """Code that is ready to run in the namespace of its module."""

    code: CodeType
    module: ModuleType
    argv0: str


def own_directories(target: str, module: bool, cwd: str, python_path: str) -> list[str]:
    """Return the entries that `python target` would put in front of sys.path; `target` may be one of `NAMELESS`."""
    beside = "" if target in NAMELESS else str((Path(cwd) / target).resolve().parent)
    first = cwd if module else beside
    return [first, *(str(Path(cwd) / entry) for entry in python_path.split(os.pathsep) if entry)]


def load(target: str, module: bool) -> LoadedScript:
    """Compile the script; call within the session, so that its paths count. A ScriptError if it does not exist."""
    if module:
        return _load_module(target)
    # As Python's own __main__ has it: absolute, and otherwise as it was given.
    path = target if target.startswith(os.sep) else f"{os.getcwd()}{os.sep}{target}"  # noqa: PTH109
    if Path(path).is_dir():
        path = str(Path(path) / "__main__.py")
        sys.path[0] = target
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        raise ScriptError(f"can't open file {target!r}: [Errno {error.errno}] {error.strerror}") from error
    main = _main_module(path, SourceFileLoader("__main__", path), None)
    return LoadedScript(compile(source, path, "exec", dont_inherit=True), main, target)


def load_text(source: str | bytes, target: str) -> LoadedScript:
    """Compile code that stands in no file; `target` is one of `NAMELESS`."""
    if target == "-":
        main = _main_module("<stdin>", SourceFileLoader("__main__", "<stdin>"), None)
        return LoadedScript(compile(source, "<stdin>", "exec", dont_inherit=True), main, target)
    main = _main_module("<string>", BuiltinImporter, None)
    for name in ("__file__", "__cached__"):  # such code has none
        del main.__dict__[name]
    return LoadedScript(compile(source, "<string>", "exec", dont_inherit=True), main, target)


def _load_module(name: str) -> LoadedScript:
    spec = _find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_spec(f"{name}.__main__")
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    code = get_code(spec.name) if spec is not None and get_code is not None else None
    if spec is None or code is None or spec.origin is None:
        raise ScriptError(f"No module named {name}, or it cannot be run; see python -m")
    return LoadedScript(code, _main_module(spec.origin, spec.loader, spec), spec.origin)


def _find_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _main_module(file: str, loader: object, spec: ModuleSpec | None) -> ModuleType:
    main = ModuleType("__main__")
    main.__file__ = file
    main.__loader__ = loader  # type: ignore[assignment]
    main.__spec__ = spec
    main.__package__ = spec.parent if spec is not None else None
    cached = spec.cached if spec is not None else None
    main.__dict__.update(__builtins__=__builtins__, __annotations__={}, __cached__=cached)
    return main


def wait_for_gloo_at_exit() -> None:
    """Wait for gloo when the script and its own `atexit` functions are done: call this before they register.

    A gloo worker that still has to drop a tensor when Python is being finalized asks for the interpreter's lock, is
    ended by Python in the middle of C++ and takes the whole process with it: "terminate called without an active
    exception", exit code 134 instead of the script's own. PyTorch 2.13 with Python 3.11 does so in every third run of
    two ranks that leave right after a collective, with `destroy_process_group` too if something
    (DistributedDataParallel) still holds the group.
    """
    atexit.register(_wait_for_gloo_workers)


def _wait_for_gloo_workers() -> None:
    """Give the interpreter's lock away until all workers sleep, one second at most; nothing where there are none.

    A worker that waits for a rank that is gone sleeps too, and is not waited for.
    """
    end_s = time.monotonic() + _LIMIT_S
    quiet = 0
    while quiet < _QUIET_POLLS and time.monotonic() < end_s:
        states = _worker_states()
        if not states:
            return
        quiet = quiet + 1 if states == {"S"} else 0
        time.sleep(_POLL_S)


def _worker_states() -> set[str]:
    """Letters of proc(5) of gloo's workers."""
    states = set()
    for task in threads_of(os.getpid()):
        with contextlib.suppress(OSError):  # the thread ended meanwhile
            name, fields = stat_of(task)
            if name == _WORKER_NAME:
                states.add(fields[0])
    return states


_kept: Final[dict[weakref.ref[Any], Any]] = {}


def keep_process_groups() -> None:
    """Let no such model be the last to hold its process group, from the import of PyTorch's module on.

    Its reducer, in C++, would wait for the end of gloo's threads while it holds the interpreter's lock, and one of them
    may want that lock to drop a tensor: the whole process would stop. Python's own reference gives the lock away.
    """
    after_import("torch.nn.parallel.distributed", _keep_groups)


def _keep_groups(module: ModuleType) -> None:
    model = module.DistributedDataParallel
    plain = model._ddp_init_helper

    def make_reducer(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = plain(self, *args, **kwargs)
        for holder in (self.reducer, self.logger):  # the logger holds the reducer, too
            if holder is not None:
                _kept[weakref.ref(holder, _kept.pop)] = self.process_group
        return made

    model._ddp_init_helper = make_reducer


#: The last words are CUDA's where the GPU's compute mode is EXCLUSIVE_PROCESS and another process has it.
_WORDS: Final = re.compile(
    r"(CUDA|HIP)( error:)? out of memory|CUBLAS_STATUS_ALLOC_FAILED|RESOURCE_EXHAUSTED: Out of memory|"
    r"devices?(\(s\))? (is|are|is/are) busy or unavailable"
)


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that led to it, the last one first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that led to it, is PyTorch's, JAX's or CUDA's for lack of GPU memory."""
    return any(
        isinstance(link, RuntimeError) and (type(link).__name__ == "OutOfMemoryError" or _WORDS.search(str(link)))
        for link in chain_of(error)
    )


Hook = Callable[[ModuleType], None]

_hooks: Final[dict[str, list[Hook]]] = {}


class _HookFinder:
    """Finds the hooked modules as the other finders do, and calls the hooks after they were executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give, with a loader that calls the hooks."""
        if name not in _hooks:
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            spec = None if finder is self or find_spec is None else find_spec(name, path, target)
            if spec is not None:
                _wrap(spec.loader)
                wrapped: ModuleSpec = spec
                return wrapped
        return None


_finder: Final = _HookFinder()


def _wrap(loader: Any) -> None:
    plain = getattr(loader, "exec_module", None)
    if plain is None:
        return

    def exec_module(module: ModuleType) -> None:
        plain(module)
        for hook in _hooks[module.__name__]:
            hook(module)

    loader.exec_module = exec_module


def after_import(name: str, hook: Hook) -> None:
    """Call a function with the module of that full name: now if it is imported already, else when it will be.

    Other threads that import the module wait until the function has returned.
    """
    _hooks.setdefault(name, []).append(hook)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if name in sys.modules:
        hook(sys.modules[name])
