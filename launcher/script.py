"""Loads a script or module as a session's `__main__`."""

import importlib.util
import io
import os
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from muri.errors import UsageError


class ScriptError(UsageError):
    """The script or module cannot be run."""


@dataclass(frozen=True, slots=True)
class LoadedScript:
    """Code that is ready to run in the namespace of its module."""

    code: CodeType
    module: ModuleType
    argv0: str


def own_directories(target: str, module: bool, cwd: str, python_path: str) -> list[str]:
    """What `python target` would put in front of sys.path.

    Args:
        target: Script or module.
        module: Whether it is a module.
        cwd: The member's working directory.
        python_path: The member's $PYTHONPATH.
    """
    first = cwd if module else str((Path(cwd) / target).resolve().parent)
    return [first, *(str(Path(cwd) / entry) for entry in python_path.split(os.pathsep) if entry)]


def load(target: str, module: bool) -> LoadedScript:
    """Compile the script; call within the session, so that its paths count.

    Raises:
        ScriptError: It is not there.
        SyntaxError: It is not Python.
    """
    return _load_module(target) if module else _load_file(target)


def _load_file(target: str) -> LoadedScript:
    path = Path(target).absolute()  # as Python's own __main__ has it
    if path.is_dir():
        path = path / "__main__.py"
        sys.path[0] = target
    try:
        with io.open_code(str(path)) as file:
            source = file.read()
    except OSError as error:
        raise ScriptError(f"can't open file {target!r}: [Errno {error.errno}] {error.strerror}") from error
    main = _main_module(str(path), SourceFileLoader("__main__", str(path)), None)
    return LoadedScript(compile(source, str(path), "exec", dont_inherit=True), main, target)


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
    main.__dict__.update(__builtins__=__builtins__, __annotations__={}, __cached__=None)
    return main
