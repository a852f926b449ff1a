"""What a script cannot do in a thread without a wrong result or a halt of its partners.

Dry runs keep such scripts out of threads. One that does it nevertheless is given up here, before the act: its job goes
back to the queue and runs alone (docs/shared-process.md).
"""

import os
import signal
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from muri.launcher.job.import_hooks import after_import
from muri.launcher.shared_process.state import current_session

PROCESS_WIDE_PACKAGES: Final = frozenset({"accelerate", "transformers"})
"""Packages that keep the state of a training, such as its gradient accumulation, once for the whole process."""

_FUNCTIONS: Final = (
    ("torch", "compile", "torch.compile"),
    ("torch.distributed.distributed_c10d", "init_process_group", "torch.distributed"),
    ("torch.distributed", "init_process_group", "torch.distributed"),
    ("resource", "setrlimit", "resource limits"),
    ("resource", "prlimit", "resource limits"),
)
"""Modules, their functions that a session must not call, and what the user is told that the script uses."""


def check_import(top: str) -> None:
    """Give the session up if it imports a package that keeps one state for all members.

    Args:
        top: Top-level name of an installed package.
    """
    if top in PROCESS_WIDE_PACKAGES:
        _refuse(top)


def install_dangers() -> None:
    """Patch the functions through which a script would do such a thing."""
    for name in ("fork", "forkpty"):
        _forbid(os, name, "forked processes")
    for name in ("alarm", "setitimer"):
        _forbid(signal, name, "timers that send signals")
    for module, function, what in _FUNCTIONS:
        after_import(module, _forbidding(function, what))
    after_import("multiprocessing.process", lambda module: _forbid(module.BaseProcess, "start", "worker processes"))


def _forbidding(function: str, what: str) -> Callable[[ModuleType], None]:
    return lambda module: _forbid(module, function, what)


def _forbid(owner: Any, name: str, what: str) -> None:
    plain, runtime_pid = getattr(owner, name), os.getpid()

    def unless_in_thread(*args: Any, **kwargs: Any) -> Any:
        if os.getpid() == runtime_pid:
            _refuse(what)
        return plain(*args, **kwargs)

    setattr(owner, name, unless_in_thread)


def _refuse(what: str) -> None:
    session = current_session()
    if session is not None:
        session.refuse(f"the script uses {what}, which is not safe in a thread of the group's process")
