"""Sets the signals, umask, limits and directory that a process inherits from its parent as Muri needs them.

Slurm, systemd, cron and shells leave different things to their children: Slurm 25.05 blocks SIGCHLD in a job's tasks,
a shell ignores SIGINT in the background, an administrator's umask, limits and directory are his own. Commands, which
may become a user's program, `settle`, and `give_back` then; a process that stays Muri's own begins with `settle_own`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PRIVATE: Final = 0o077
"""The umask that keeps a process's files private to its user."""

PUBLIC: Final = 0o022
"""The controller's umask, which sbatch passes on to jobs; the controller's private files set their own mode."""

_FILES_NEEDED: Final = 1024
"""What most systems allow; select() knows no more."""

_PYTHONS: Final = {signal.SIGPIPE, signal.SIGXFSZ}
"""Signals that every Python ignores, whatever it inherits."""

_taken: set[signal.Signals] = set()
"""Signals that this process has inherited as ignored, and does not ignore."""


def settle() -> None:
    """Open what is closed of the standard files, and learn of the ends of children.

    No other file can then take the place of a standard one. A program that this process becomes finds them closed.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if not os.path.lexists(f"/proc/self/fd/{number}"):
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 (Python has set it to None)
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # then the kernel keeps no exit codes of children
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _taken.add(signal.SIGCHLD)


def give_back() -> None:
    """Undo what `settle` has changed, for a user's program that takes this process over."""
    for number in _taken:
        signal.signal(number, signal.SIG_IGN)


def settle_own(umask: int = PRIVATE) -> None:
    """Settle a process that stays Muri's own: signals, umask, working directory, limits, open files.

    Args:
        umask: Permissions that new files do not get.
    """
    settle()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(umask)
    _leave_lost_directory()
    _raise(resource.RLIMIT_NOFILE, _FILES_NEEDED)
    for number in (resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):
        _raise(number, resource.RLIM_INFINITY)
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 (numbers)
        with contextlib.suppress(OSError):  # the listing's own
            os.set_inheritable(number, number <= 2)


def _leave_lost_directory() -> None:
    """Leave a working directory that was deleted or cannot be reached: srun and sbatch end in such a one."""
    try:
        is_lost = not os.access(Path.cwd(), os.X_OK)
    except FileNotFoundError:
        is_lost = True
    if is_lost:
        os.chdir("/")


def _raise(number: int, wanted: int) -> None:
    """Raise a soft limit to what is wanted, or as far as the hard one allows."""
    soft, hard = resource.getrlimit(number)
    if hard != resource.RLIM_INFINITY:
        wanted = hard if wanted == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and (wanted == resource.RLIM_INFINITY or soft < wanted):
        resource.setrlimit(number, (wanted, hard))


def blocked() -> tuple[int, ...]:
    """The signals that this thread blocks."""
    return tuple(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))


def ignored() -> tuple[int, ...]:
    """The signals that this process has inherited as ignored; those that every Python ignores are left out."""
    found = {number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN}
    return tuple(sorted((found | _taken) - _PYTHONS))


def working_directory() -> str:
    """The working directory, by a way that leads there even where it was deleted, while this process lives."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return f"/proc/{os.getpid()}/cwd"


@contextlib.contextmanager
def garbage_collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector, if it was on.

    Reading and planning a queue makes a million small records that all stay, and none of them in a reference cycle. The
    collector would look at all of them again and again: a fifth of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
