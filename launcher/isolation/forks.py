"""What a process that a session forks must find: its own handles, and no lock that somebody else's thread holds.

A forked process has one thread. A lock that another member's thread held at that moment stays locked in it: the
workers of a `DataLoader` would wait for ever in `torch.manual_seed` (PyTorch's `_initialization_lock`), or in an import
that another member had begun. Python does this for its own locks; here it is done for those of libraries.
"""

import contextlib
import os
import sys
import threading
import time
from operator import attrgetter
from typing import Any, Final

from muri.launcher.isolation.local_imports import ImportTurns, LocalModules
from muri.launcher.job.session import SessionState, current_session

_LOCKS: Final = (
    ("muri.launcher.isolation.torch_settings", "flags.lock"),
    ("logging", "_lock"),  # Python takes it for the fork, too, but would wait for a holder that waits for our turn
    ("tempfile", "_once_lock"),
    ("torch.cuda", "_initialization_lock"),
    ("torch.mtia", "_initialization_lock"),
    ("torch.xpu", "_initialization_lock"),
    ("torch.storage", "_share_memory_lock"),
    ("torch.utils._pytree", "_NODE_REGISTRY_LOCK"),
    ("torch.utils.data.dataloader", "_persistent_workers_atexit_lock"),
    ("tqdm.std", "TqdmDefaultWriteLock.th_lock"),
)
"""Modules, and their locks that forked processes take; their holders leave them within milliseconds."""

_LIMIT_S: Final = 5.0
"""After this time a session forks nevertheless, as a process of its own would; the lock is made anew in the child."""

_POLL_S: Final = 0.001


class _Fork(threading.local):
    """What this thread has taken for the fork that it is in."""

    def __init__(self) -> None:
        self.session: SessionState | None = None
        self.turn = False
        self.held: list[Any] = []
        self.missed: list[Any] = []


class ForkLocks:
    """Takes the import turn and the locks for as long as a session forks.

    Args:
        turns: Whose turn it is to import: a module that another member is importing would stay half imported.
        modules: The members' own modules, one of which may just be put in another's place.
    """

    def __init__(self, turns: ImportTurns, modules: LocalModules) -> None:
        self._turns, self._modules, self._fork = turns, modules, _Fork()

    def install(self) -> None:
        """From now on, for every fork of this process."""
        os.register_at_fork(before=self._take, after_in_parent=self._end, after_in_child=self._give_in_child)

    def _take(self) -> None:
        session = current_session()
        if session is None:
            return
        session.hold_back()  # a lock that is taken and not noted would never be given back
        self._fork.session = session
        end_s = time.monotonic() + _LIMIT_S
        locks = [lock for module, name in _LOCKS if (lock := _find(module, name)) is not None]
        locks.append(self._modules.exchange_lock)
        while not self._try(session, locks) and time.monotonic() < end_s:
            # Keep nothing while waiting: who holds the one may wait for the other.
            self._give()
            time.sleep(_POLL_S)

    def _try(self, session: SessionState, locks: list[Any]) -> bool:
        fork = self._fork
        fork.turn, fork.held, fork.missed = self._turns.take(session), [], []
        for lock in locks:
            (fork.held if lock.acquire(blocking=False) else fork.missed).append(lock)
        return not fork.missed

    def _give(self) -> None:
        fork = self._fork
        while fork.held:
            fork.held.pop().release()
        if fork.turn:
            fork.turn = False
            self._turns.give()

    def _end(self) -> None:
        self._give()
        session, self._fork.session = self._fork.session, None
        if session is not None:
            session.let_through(False)  # Python would swallow what is raised here

    def _give_in_child(self) -> None:
        fork = self._fork
        for lock in fork.held:
            with contextlib.suppress(RuntimeError):  # Python has made its own anew already
                lock.release()
        for lock in fork.missed:
            lock._at_fork_reinit()  # what `logging` and `threading` call for theirs
        fork.session, fork.turn, fork.held, fork.missed = None, False, [], []  # the turns are renewed in the child


def _find(module: str, name: str) -> Any:
    with contextlib.suppress(KeyError, AttributeError):  # not imported, or another version of the library
        return attrgetter(name)(sys.modules[module])
    return None
