"""Lets one session at a time import installed packages.

Python locks each module that it imports, not the package that it belongs to. Two threads that start with different
parts of one package (`import torch`, `from torch.utils.data import DataLoader`) can wait for each other; Python
notices and lets one of them go on with a module that is half made: "partially initialized module".
"""

import importlib
import os
import threading
import time
from collections.abc import Callable
from types import CodeType
from typing import Any, Final

from muri.launcher.context import current_session
from muri.launcher.isolation.local_modules import LocalModules

LONGEST_WAIT_S: Final = 120.0
"""Then it is imported out of turn, as plain threads would do; a package may wait for another session's import."""

_bootstrap: Final[Any] = importlib._bootstrap
_RUNTIME: Final = object()


class ImportTurns:
    """Who imports. All threads of a session share its turn, as they would in a process of their own."""

    def __init__(self, longest_wait_s: float = LONGEST_WAIT_S) -> None:
        self._longest_wait_s = longest_wait_s
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        """Also in a forked child: another member's thread, which the child has not, may have had the turn."""
        self._ended = threading.Condition()
        self._holder: object = None
        self._depth = 0

    def take(self, who: object) -> bool:
        """Wait for the turn; returns whether it was got."""
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


def install_import_turns(modules: LocalModules) -> None:
    """Patch what Python calls for a module that is not in `sys.modules` yet.

    Args:
        modules: Tells the sessions' own modules, which are exchanged and not shared: they need no turn, and
            importing one may train for days.
    """
    turns, find_and_load = ImportTurns(), _bootstrap._find_and_load

    def _find_and_load(name: str, import_: Callable[..., Any]) -> Any:
        session = current_session()
        if session is not None and modules.is_local(session, name.partition(".")[0]):
            return find_and_load(name, import_)
        got = turns.take(_RUNTIME if session is None else session)
        try:
            return find_and_load(name, import_)
        finally:
            if got:
                turns.give()

    # Python leaves frames of this file out of tracebacks.
    code: CodeType = _find_and_load.__code__
    _find_and_load.__code__ = code.replace(co_filename=_bootstrap._find_and_load.__code__.co_filename)
    _bootstrap._find_and_load = _find_and_load
