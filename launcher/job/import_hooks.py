"""Calls functions as soon as a module has been imported, so that patches need not import it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Final

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
                found: ModuleSpec = spec
                return found
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
    """Call a function with the module: now if it is imported already, else when it will be.

    Other threads that import the module wait until the function has returned.

    Args:
        name: Full name of the module.
        hook: Receives the module.
    """
    _hooks.setdefault(name, []).append(hook)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if name in sys.modules:
        hook(sys.modules[name])
