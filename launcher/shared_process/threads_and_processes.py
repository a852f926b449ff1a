"""Makes threads that a session starts belong to it, including those that PyTorch starts in C++.

PyTorch hands certain thread-local objects on to the threads that work on a backward pass, such as autograd's one per
GPU. The session is among them before each pass.

Dry runs keep scripts out of threads that would give a wrong result there or halt their partners. One that does such a
thing nevertheless is given up here, before the act: its job goes back to the queue and runs alone
(docs/shared-process.md).
"""

import _posixsubprocess
import ctypes
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any, Final

from muri.launcher.job.script import after_import
from muri.launcher.shared_process.danger_watch import CALLS, before_switches_change, call_first, watch_calls
from muri.launcher.shared_process.state import (
    PerSession,
    SessionState,
    current_session,
    enter_session,
    foreign_look_ups,
    in_session,
)

_KEY: Final = "muri.session"
_at_start: Final[list[Callable[[SessionState], None]]] = []
_first: PerSession[threading.Thread] = PerSession(threading.main_thread)
"""A session's first thread, which is the main one to its script; the process's to threads that outlive the session."""

_at_session_start: Final[list[Callable[[SessionState], None]]] = []


def at_thread_start(function: Callable[[SessionState], None]) -> None:
    """Call a function in each thread that a session starts, before the thread's own work."""
    _at_start.append(function)


def at_session_start(function: Callable[[SessionState], None]) -> None:
    """Call a function in a session's first thread only."""
    _at_session_start.append(function)


def begin_session(session: SessionState) -> None:
    """Make the calling thread the session's first one."""
    enter_session(session)
    _first.put(session, threading.current_thread())
    threading.current_thread().name = "MainThread"
    for function in (*_at_session_start, *_at_start):
        function(session)


def _run_in_session(session: SessionState, run: Callable[[], None]) -> None:
    enter_session(session)
    for function in _at_start:
        function(session)
    run()


_executors: PerSession["weakref.WeakSet[ThreadPoolExecutor]"] = PerSession(weakref.WeakSet)
"""The thread pools that a session has made."""


def install_threads() -> None:
    """Let threads inherit the session of the thread that starts them, and give each session a main thread."""
    start, make = threading.Thread.start, ThreadPoolExecutor.__init__

    def start_in_session(thread: threading.Thread) -> None:
        session = current_session()
        if session is not None:
            thread.run = partial(_run_in_session, session, thread.run)  # type: ignore[method-assign]
            session.threads = [other for other in session.threads if other.is_alive()] + [thread]
        start(thread)

    def make_executor(own: ThreadPoolExecutor, *args: Any, **kwargs: Any) -> None:
        make(own, *args, **kwargs)
        session = current_session()
        if session is not None:
            _executors.of(session).add(own)

    threading.Thread.start = start_in_session  # type: ignore[method-assign, assignment]
    threading.main_thread = in_session(threading.main_thread)(_first.of)
    ThreadPoolExecutor.__init__ = make_executor  # type: ignore[method-assign, assignment]


def close_executors(session: SessionState) -> None:
    """Let the threads of a session's pools end once their work is done, as Python does when it exits."""
    for executor in list(_executors.of(session)):
        executor.shutdown(wait=False)


def _owning_stash(core: Any) -> Callable[[str, object], None]:
    """Return PyTorch's function that keeps an object for a thread; it keeps a reference of its own.

    PyTorch 2.11 takes over the caller's reference instead, so that the object is freed while others use it.
    """
    plain, probe = core._stash_obj_in_tls, object()

    def owning(key: str, value: object) -> None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
        plain(key, value)

    count = sys.getrefcount(probe)
    plain(_KEY, probe)
    takes_over = sys.getrefcount(probe) == count
    if takes_over:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    stash: Callable[[str, object], None] = owning if takes_over else plain
    stash(_KEY, None)
    return stash


def patch_autograd(torch: ModuleType) -> None:
    """Let PyTorch's own threads of a backward pass know the session that waits for it."""
    core = torch._C
    if not hasattr(core, "_stash_obj_in_tls"):
        return  # in this version, hooks that print in such a thread print to the runtime's output
    stash = _owning_stash(core)
    plain = torch.autograd.graph._engine_run_backward

    @in_session(plain)
    def engine_run_backward(session: SessionState, *args: Any, **kwargs: Any) -> Any:
        before = look_up()
        stash(_KEY, session)
        try:
            return plain(*args, **kwargs)
        finally:
            # Drop the session here: the end of the thread would drop it without an interpreter.
            stash(_KEY, before)

    for module in (torch.autograd, torch.autograd.graph):
        if getattr(module, "_engine_run_backward", None) is plain:
            module._engine_run_backward = engine_run_backward

    def look_up() -> SessionState | None:
        if not core._is_key_in_tls(_KEY):
            return None
        session: SessionState | None = core._get_obj_in_tls(_KEY)
        return session

    foreign_look_ups.append(look_up)


PROCESS_WIDE_PACKAGES: Final = frozenset({"accelerate", "transformers"})
"""Packages that keep the state of a training, such as its gradient accumulation, once for the whole process."""


def check_import(top: str) -> None:
    """Give the session up if it imports this installed package and that keeps one state for all members."""
    if top in PROCESS_WIDE_PACKAGES:
        _refuse(top)


def install_dangers() -> None:
    """Patch the functions through which a script would do such a thing."""
    for name in CALLS:
        watch_calls(name, partial(_refuse, name))
    for name in ("fork", "forkpty"):
        call_first(os, name, partial(_refuse, "forked processes"))
    subprocesses, workers = partial(_refuse, "subprocesses"), partial(_refuse, "worker processes")
    for name in ("execv", "execve", "posix_spawn", "posix_spawnp", "system"):
        call_first(os, name, subprocesses)
    call_first(subprocess.Popen, "__init__", subprocesses)
    call_first(_posixsubprocess, "fork_exec", subprocesses)  # multiprocessing calls it
    after_import("multiprocessing.process", lambda module: call_first(module.BaseProcess, "start", workers))
    switches = partial(_refuse, "switches of PyTorch")
    after_import("torch", lambda torch: before_switches_change(torch, switches))


def of_the_process(name: str, what: str) -> property:
    """Return a property of the process; a session that would change it is given up."""

    def put(owner: Any, value: Any) -> None:
        if owner.__dict__.get(name, value) != value:
            _refuse(what)
        owner.__dict__[name] = value

    return property(lambda owner: owner.__dict__[name], put)


def _refuse(what: str) -> None:
    session = current_session()
    if session is not None:
        session.refuse(f"the script uses {what}, which is not safe in a thread of the group's process")
