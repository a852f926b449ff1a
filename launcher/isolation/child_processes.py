"""The children that a session starts with `multiprocessing`: the library keeps one list of them per process.

With a common list, `active_children()` would show the other members' workers, and two members that look after children
at once would take each other's exit codes.
"""

import itertools
import sys
import traceback
from collections.abc import Iterator, MutableSet
from functools import partial
from math import inf
from typing import Any, Final

from muri.launcher.job.import_hooks import after_import
from muri.launcher.job.session import PerSession, SessionState, current_session

_POLL_S: Final = 0.5
"""How often a session that waits for its children looks whether it is told to end."""


class _Children:
    """A session's children, how many it has started, and the finalizers of its pools, queues and managers."""

    def __init__(self) -> None:
        self.processes: set[Any] = set()
        self.counter = itertools.count(1)
        self.finalizers: list[tuple[int | None, int]] = []


_children: PerSession[_Children] = PerSession(_Children)


def _own(session: SessionState) -> _Children:
    if _children not in session.belongings:
        # The library ends what is left when Python exits; the session does so when its own functions have run.
        session.exit_functions.insert(0, partial(_end_children, session))
    return _children.of(session)


class _Processes(MutableSet[Any]):
    """Replaces `multiprocessing.process._children`."""

    def __init__(self, plain: set[Any]) -> None:
        self._plain = plain

    def _target(self) -> set[Any]:
        session = current_session()
        return self._plain if session is None else _own(session).processes

    def __contains__(self, process: object) -> bool:
        return process in self._target()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._target())

    def __len__(self) -> int:
        return len(self._target())

    def add(self, value: Any) -> None:
        """See set.add."""
        self._target().add(value)

    def discard(self, value: Any) -> None:
        """See set.discard."""
        self._target().discard(value)


class _Counter:
    """Replaces `multiprocessing.process._process_counter`: a session's first child is Process-1."""

    def __init__(self, plain: Iterator[int]) -> None:
        self._plain = plain

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        session = current_session()
        return next(self._plain if session is None else _own(session).counter)


def _patch_process(module: Any) -> None:
    module._children, module._process_counter = _Processes(module._children), _Counter(module._process_counter)


def _patch_finalizers(module: Any) -> None:
    plain = module.Finalize.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        session = current_session()
        if session is not None:
            own = _own(session)
            own.finalizers = [*filter(module._finalizer_registry.__contains__, own.finalizers), self._key]

    module.Finalize.__init__ = make


def _end_children(session: SessionState) -> None:
    """Do what `multiprocessing` does when Python exits: close pools, terminate daemons, wait for the others."""
    own = _children.of(session)
    _run_finalizers(own, at_least=0)
    for process in list(own.processes):
        if process.daemon:
            process.terminate()
    for process in list(own.processes):
        while process.is_alive() and not session.interrupted.is_set():
            process.join(_POLL_S)
    _run_finalizers(own)


def _run_finalizers(own: _Children, at_least: float = -inf) -> None:
    """Call those of at least this priority, highest and newest first; those without one are for the collector only."""
    registry: dict[tuple[int | None, int], Any] = sys.modules["multiprocessing.util"]._finalizer_registry
    for key in sorted((key for key in own.finalizers if key[0] is not None and key[0] >= at_least), reverse=True):
        try:
            if (finalizer := registry.get(key)) is not None:  # else it has been called, or is not needed any more
                finalizer()
        except Exception:  # as the library itself does
            traceback.print_exc()


def install_children() -> None:
    """Patch `multiprocessing` once it is imported."""
    after_import("multiprocessing.process", _patch_process)
    after_import("multiprocessing.util", _patch_finalizers)
