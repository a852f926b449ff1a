"""Calls a function right after a module was imported for the first time."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, function: Callable[[], None]) -> None:
    """Call `function` when the module has been imported, at once if it is there already."""
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _Finder(name, function))


class _Finder(MetaPathFinder):
    """Finds one module the way the others do, and lends it a loader that calls the function."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name = name
        self._function = function
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec with the lent loader; None for all other modules."""
        if fullname != self._name or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return None
        spec.loader = _LentLoader(spec.loader, self._loaded)
        return spec

    def _loaded(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._function()


class _LentLoader(Loader):
    """Loads as the module's own loader does, leaves that one in place, and tells."""

    def __init__(self, own: Loader, loaded: Callable[[], None]) -> None:
        self._own = own
        self._loaded = loaded

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then call the function."""
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        self._loaded()
