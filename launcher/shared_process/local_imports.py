"""Gives each session the modules of its own directories, and lets sessions import installed packages in turns.

Two members may both have a `model.py`. `sys.modules` holds one module per name. Where a session finds a name in a
directory of its own (its script's, one of its $PYTHONPATH, or one that it has added to `sys.path`), the entry is
exchanged whenever another session imports that name.

Installed packages are shared. Python locks each module that it imports, not the package that it belongs to: two threads
that start with different parts of one package (`import torch`, `from torch.utils.data import DataLoader`) can wait for
each other. Python detects the deadlock and lets one of them go on with a "partially initialized module". Turns avoid
it. A package may also put another module in its own place while it is imported (lazy modules), so a session waits for
the end of another's import of it.
"""

import builtins
import importlib
import io
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

from muri.launcher.job.script import after_import
from muri.launcher.shared_process.state import PerSession, SessionState, current_session, in_session
from muri.launcher.shared_process.threads_and_processes import check_import

LONGEST_WAIT_S: Final = 120.0
"""After this wait a session imports out of turn, as plain threads do: a package may wait for another's import."""

_RUNTIME: Final = object()
_bootstrap: Final[Any] = importlib._bootstrap


class ImportTurns:
    """Whose turn it is to import. All threads of a session share its turn, as in a process of their own."""

    def __init__(self, longest_wait_s: float = LONGEST_WAIT_S) -> None:
        self._longest_wait_s = longest_wait_s
        self._ended = threading.Condition()
        self._holder: object = None
        self._depth = 0

    def take(self, who: object) -> bool:
        """Wait for the turn; return whether this thread got it."""
        end_s = time.monotonic() + self._longest_wait_s
        with self._ended:
            while self._holder not in (None, who):
                if not self._ended.wait(end_s - time.monotonic()):
                    return False
            self._holder = who
            self._depth += 1
            return True

    def give(self) -> None:
        """End what `take` began."""
        with self._ended:
            self._depth -= 1
            if self._depth == 0:
                self._holder = None
                self._ended.notify_all()


class LocalModules:
    """Decides which session's modules `sys.modules` holds under each local name.

    Names that are `shared`, because the runtime itself has imported them, are never local. The sessions take `turns` to
    import modules that they share.
    """

    def __init__(self, shared: frozenset[str]) -> None:
        self.turns: Final = ImportTurns()
        self._shared = shared | sys.stdlib_module_names
        self._lock = threading.RLock()
        self._active: dict[str, SessionState | None] = {}
        """Whose module `sys.modules` holds under a name that is local to some session; None: an installed one."""
        self._local: PerSession[dict[str, bool]] = PerSession(dict)
        self._kept: PerSession[dict[str, dict[str, ModuleType]]] = PerSession(dict)
        self._kept_installed: dict[str, dict[str, ModuleType]] = {}

    def run(self, session: SessionState, name: str, load: Callable[[], Any]) -> Any:
        """Import a module, or something from it, for a session."""
        top = name.partition(".")[0]
        local = self.is_local(session, top)
        if not local and top not in self._active:
            check_import(top)
            if _being_imported(name) and self.turns.take(session):
                self.turns.give()
            return load()
        with self._lock:
            self._exchange_for(session, session if local else None, top)
            return load()

    def all_in_place(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Let a function find all local modules of the session in `sys.modules`, where it looks itself."""

        @in_session(plain)
        def call(session: SessionState, *args: Any, **kwargs: Any) -> Any:
            with self._lock:
                for top in list(self._kept.of(session)):
                    self._exchange_for(session, session, top)
                return plain(*args, **kwargs)

        return call

    def forget(self, session: SessionState) -> None:
        """Take the modules of an ended session out of `sys.modules`; those kept aside go with its belongings."""
        with self._lock:
            for top in [name for name, active in self._active.items() if active is session]:
                self._exchange(None, top)
                del self._active[top]

    def _exchange_for(self, session: SessionState, owner: SessionState | None, top: str) -> None:
        """Put a session's module, or the installed one, into `sys.modules`, without an interruption in between."""
        if top in self._active and self._active[top] is owner:
            return
        session.hold_back()
        try:
            self._exchange(owner, top)
        finally:
            session.let_through()

    def _exchange(self, owner: SessionState | None, top: str) -> None:
        self._kept_of(self._active.get(top))[top] = _take(top)
        sys.modules.update(self._kept_of(owner).pop(top, {}))
        self._active[top] = owner

    def _kept_of(self, owner: SessionState | None) -> dict[str, dict[str, ModuleType]]:
        return self._kept_installed if owner is None else self._kept.of(owner)

    def is_local(self, session: SessionState, top: str) -> bool:
        """Whether a session finds this top-level name in its own directories."""
        if not top or top in self._shared:
            return False
        known = self._local.of(session)
        if top not in known:
            found = _found_in(session, top)
            installed = top in self._kept_installed or (top in sys.modules and self._active.get(top) is None)
            if not found and not installed:
                return False  # the session may still make the module, or add its directory to `sys.path`
            known[top] = found
        return known[top]


def _found_in(session: SessionState, top: str) -> bool:
    """Whether a session's own directories hold all parts of a module.

    Relative entries of its `sys.path` are made absolute: Python caches modules by an entry's name, for all.
    """
    path = [entry for entry in session.path if isinstance(entry, str)]
    own = {Path(entry).absolute() for entry in path if entry not in session.shared_path}
    session.path[:] = [
        entry if not isinstance(entry, str) or not entry or entry in session.shared_path else os.path.abspath(entry)  # noqa: PTH100 (of strings)
        for entry in session.path
    ]
    spec = PathFinder.find_spec(top, session.path)
    if spec is None:
        return False
    places = spec.submodule_search_locations or [spec.origin or ""]
    return all(Path(os.path.abspath(place)).parent in own for place in places)  # noqa: PTH100


def _being_imported(name: str) -> bool:
    """Whether the import of a module, or of a package that it is in, has begun and not ended."""
    while name:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if getattr(spec, "_initializing", False):
            return True
        name = name.rpartition(".")[0]
    return False


def _take(top: str) -> dict[str, ModuleType]:
    names = [name for name in list(sys.modules) if name == top or name.startswith(f"{top}.")]
    return {name: sys.modules.pop(name) for name in names}


def install_local_modules() -> LocalModules:
    """Patch the import statement and `importlib.import_module`."""
    modules = LocalModules(frozenset(name.partition(".")[0] for name in sys.modules))
    plain_import, plain_import_module, plain_reload = builtins.__import__, importlib.import_module, importlib.reload

    @in_session(plain_import)
    def session_import(session: SessionState, name: str, *arguments: Any, **keywords: Any) -> Any:
        level = arguments[3] if len(arguments) > 3 else keywords.get("level", 0)
        if level:
            scope = arguments[0] if arguments else keywords.get("globals")
            name_from = str((scope or {}).get("__package__") or "")
        else:
            name_from = name
        return modules.run(session, name_from, lambda: plain_import(name, *arguments, **keywords))

    @in_session(plain_import_module)
    def session_import_module(session: SessionState, name: str, package: str | None = None) -> Any:
        name_from = (package or "") if name.startswith(".") else name
        return modules.run(session, name_from, lambda: plain_import_module(name, package))

    importlib.reload = modules.all_in_place(plain_reload)
    _install_pickling(modules)
    builtins.__import__ = session_import
    importlib.import_module = session_import_module
    return modules


def use_once(torch: ModuleType) -> None:
    """Let PyTorch import now what its C++ looks up when it is first asked for a tensor, a number or a profiler's label.

    It holds a lock of C++ meanwhile. Another member's thread would wait for that one and keep the interpreter's lock,
    without which `session_import` cannot go on: the whole group would hang.
    """
    torch.tensor([0.0])
    torch.empty(1).fill_(0.0)
    with torch.autograd.profiler.record_function("first use"):
        pass


def _install_pickling(modules: LocalModules) -> None:
    """Patch pickling, which looks classes up in `sys.modules` without an import statement or after it."""

    class Pickler(pickle.Pickler):
        """The plain pickler, with the session's modules in place."""

        def dump(self, obj: Any, /) -> None:
            """See pickle.Pickler.dump."""
            modules.all_in_place(super().dump)(obj)

    class Unpickler(pickle.Unpickler):
        """The plain unpickler, which imports a module and then takes what `sys.modules` holds."""

        def find_class(self, module_name: str, global_name: str, /) -> Any:
            """See pickle.Unpickler.find_class."""
            session, find = current_session(), super().find_class
            if session is None:
                return find(module_name, global_name)
            return modules.run(session, module_name, lambda: find(module_name, global_name))

    def load(file: Any, **kwargs: Any) -> Any:
        return Unpickler(file, **kwargs).load()

    def loads(data: Any, /, **kwargs: Any) -> Any:
        return Unpickler(io.BufferedReader(io.BytesIO(data)), **kwargs).load()

    def patch_queues(reduction: Any) -> None:
        reduction.ForkingPickler.dump = modules.all_in_place(reduction.ForkingPickler.dump)
        reduction.ForkingPickler.loads = staticmethod(loads)

    library: Any = pickle
    library.Pickler = Pickler
    library.dump, library.dumps = modules.all_in_place(pickle.dump), modules.all_in_place(pickle.dumps)
    library.Unpickler, library.load, library.loads = Unpickler, load, loads
    after_import("multiprocessing.reduction", patch_queues)  # it may have kept the plain functions


def install_import_turns(modules: LocalModules) -> None:
    """Patch the function that Python calls for a module that is not in `sys.modules` yet.

    The sessions' own modules are not shared and need no turn, and importing one may train for days.
    """
    turns, find_and_load = modules.turns, _bootstrap._find_and_load

    def _find_and_load(name: str, import_: Callable[..., Any]) -> Any:
        session = current_session()
        if session is not None and modules.is_local(session, name.partition(".")[0]):
            return find_and_load(name, import_)
        if session is None:
            return in_turn(_RUNTIME, name, import_)
        session.hold_back()  # half an import, or a turn that never ends, would stop every member
        try:
            return in_turn(session, name, import_)
        finally:
            session.let_through()

    def in_turn(who: object, name: str, import_: Callable[..., Any]) -> Any:
        got = turns.take(who)
        try:
            return find_and_load(name, import_)
        finally:
            if got:
                turns.give()

    # Python leaves frames of this file out of tracebacks.
    for function in (_find_and_load, in_turn):
        code: CodeType = function.__code__
        function.__code__ = code.replace(co_filename=_bootstrap._find_and_load.__code__.co_filename)
    _bootstrap._find_and_load = _find_and_load
