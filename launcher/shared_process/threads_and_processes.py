"""Makes threads and subprocesses that a session starts belong to it, including those that PyTorch starts in C++.

PyTorch hands certain thread-local objects on to the threads that work on a backward pass, such as autograd's one per
GPU. The session is among them before each pass. Subprocesses get the session's environment and standard files.

Dry runs keep scripts out of threads that would give a wrong result there or halt their partners. One that does such a
thing nevertheless is given up here, before the act: its job goes back to the queue and runs alone
(docs/shared-process.md).
"""

import _posixsubprocess
import ctypes
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from muri.launcher.job.script import after_import
from muri.launcher.shared_process.state import (
    PerSession,
    SessionState,
    current_session,
    enter_session,
    in_session,
    look_up_foreign_threads,
)

_KEY: Final = "muri.session"
_DIRECTORY_ARGUMENT: Final = 4
_ENVIRONMENT_ARGUMENT: Final = 5
_CHILD_FILE_ARGUMENTS: Final = (6, 9, 11)
_UMASK_ARGUMENT: Final = 20
"""Arguments of `_posixsubprocess.fork_exec` for the things that a child inherits."""

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
    threading.main_thread = in_session(threading.main_thread, in_children=False)(_first.of)
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

    look_up_foreign_threads(look_up)


def _for_session(session: SessionState, arguments: Sequence[Any]) -> list[Any]:
    """The arguments of `fork_exec` with everything spelt out that the child would inherit from the session."""
    changed = list(arguments)
    directory = changed[_DIRECTORY_ARGUMENT]
    changed[_DIRECTORY_ARGUMENT] = os.path.abspath(os.curdir if directory is None else directory)  # noqa: PTH100 (or bytes)
    if changed[_ENVIRONMENT_ARGUMENT] is None:
        changed[_ENVIRONMENT_ARGUMENT] = [k + b"=" + v for k, v in session.environment.items()]
    if changed[_UMASK_ARGUMENT] == -1:
        changed[_UMASK_ARGUMENT] = _umask()
    for index, file in zip(_CHILD_FILE_ARGUMENTS, session.files, strict=True):
        if changed[index] in {-1, 0, 1, 2}:
            changed[index] = file if changed[index] == -1 else session.files[changed[index]]
    return changed


def _umask() -> int:
    """The calling thread's umask, read without changing it."""
    for line in Path("/proc/thread-self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return -1


def _install_fork_exec() -> None:
    fork_exec = _posixsubprocess.fork_exec
    # A thread without the filter of standard_files.py starts processes: they would inherit it for good.
    starter = ThreadPoolExecutor(1, thread_name_prefix="subprocesses")
    starter.submit(int).result()

    def start(session: SessionState, arguments: list[Any]) -> int:
        enter_session(session)  # for its preexec_fn
        try:
            return fork_exec(*arguments)
        finally:
            enter_session(None)

    @in_session(fork_exec, in_children=False)
    def session_fork_exec(session: SessionState, *arguments: Any) -> int:
        return starter.submit(start, session, _for_session(session, arguments)).result()

    _posixsubprocess.fork_exec = session_fork_exec
    subprocess._fork_exec = session_fork_exec  # type: ignore[attr-defined]
    # From Python 3.13 on, posix_spawn would start most processes from the session's own thread, with the filter.
    subprocess._USE_POSIX_SPAWN = False  # type: ignore[misc]


def _system(_session: SessionState, command: Any) -> int:
    code = subprocess.Popen(command, shell=True).wait()  # noqa: S602 (that is what os.system is)
    return -code if code < 0 else code << 8


def _execute(_session: SessionState, path: Any, argv: Sequence[Any], environment: Any = None) -> Any:
    """Run a subprocess for `os.exec…`, which would replace the runtime; its exit code is the script's."""
    code = subprocess.Popen(list(argv), executable=path, env=environment, close_fds=False).wait()
    return os._exit(code if code >= 0 else 128 - code)


def install_subprocesses() -> None:
    """Patch the ways to start a process."""
    _install_fork_exec()
    os.system = in_session(os.system)(_system)
    for name in ("execv", "execve"):
        setattr(os, name, in_session(getattr(os, name), in_children=False)(_execute))
    for name in ("posix_spawn", "posix_spawnp"):
        plain = getattr(os, name)

        def spawn(
            session: SessionState, *args: Any, _plain: Any = plain, file_actions: Any = (), **options: Any
        ) -> Any:
            own = [(os.POSIX_SPAWN_DUP2, file, number) for number, file in enumerate(session.files)]
            return _plain(*args, file_actions=(*own, *file_actions), **options)

        setattr(os, name, in_session(plain)(spawn))


PROCESS_WIDE_PACKAGES: Final = frozenset({"accelerate", "transformers"})
"""Packages that keep the state of a training, such as its gradient accumulation, once for the whole process."""

_FUNCTIONS: Final = (
    ("torch", "compile", "torch.compile"),
    ("torch", "set_default_dtype", "torch.set_default_dtype"),
    ("torch", "set_default_tensor_type", "torch.set_default_tensor_type"),
    ("torch.distributed.distributed_c10d", "init_process_group", "torch.distributed"),
    ("torch.distributed", "init_process_group", "torch.distributed"),
    ("resource", "setrlimit", "resource limits"),
    ("resource", "prlimit", "resource limits"),
)
"""Modules, their functions that a session must not call, and what the user is told that the script uses."""


def check_import(session: SessionState, top: str) -> None:
    """Give the session up if it imports this installed package and that keeps one state for all members."""
    if top in PROCESS_WIDE_PACKAGES:
        _refuse(session, top)


def install_dangers() -> None:
    """Patch the functions through which a script would do such a thing."""
    for name in ("fork", "forkpty"):
        _forbid(os, name, "forked processes")
    for name in ("alarm", "setitimer"):
        _forbid(signal, name, "timers that send signals")
    for name, function, what in _FUNCTIONS:
        after_import(name, partial(_forbid, name=function, what=what))
    after_import("multiprocessing.process", lambda module: _forbid(module.BaseProcess, "start", "worker processes"))


def _forbid(owner: Any, name: str, what: str) -> None:
    plain = getattr(owner, name)

    @in_session(plain, in_children=False)
    def refused(session: SessionState, *args: Any, **kwargs: Any) -> Any:
        _refuse(session, what)
        return plain(*args, **kwargs)

    setattr(owner, name, refused)


def _refuse(session: SessionState, what: str) -> None:
    session.refuse(f"the script uses {what}, which is not safe in a thread of the group's process")
