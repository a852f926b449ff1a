"""Subprocesses get the session's environment and standard files, however they are started."""

import _posixsubprocess
import os
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from muri.launcher.context import SessionState, current_session, enter_session

_DIRECTORY_ARGUMENT: Final = 4
_ENVIRONMENT_ARGUMENT: Final = 5
_CHILD_FILE_ARGUMENTS: Final = (6, 9, 11)
_UMASK_ARGUMENT: Final = 20
"""Where `_posixsubprocess.fork_exec` takes what a child inherits."""


def _for_session(session: SessionState, arguments: Sequence[Any]) -> list[Any]:
    """The arguments of `fork_exec` with all that the child would inherit from the session spelt out."""
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


def _install_fork_exec(runtime_pid: int) -> None:
    fork_exec = _posixsubprocess.fork_exec
    # Processes are started by a thread without the filter of c_output.py: they would inherit it for good.
    starter = ThreadPoolExecutor(1, thread_name_prefix="subprocesses")
    starter.submit(int).result()

    def start(session: SessionState, arguments: list[Any]) -> int:
        enter_session(session)  # for its preexec_fn
        try:
            return fork_exec(*arguments)
        finally:
            enter_session(None)

    def session_fork_exec(*arguments: Any) -> int:
        session = current_session()
        if session is None or os.getpid() != runtime_pid:
            return fork_exec(*arguments)
        return starter.submit(start, session, _for_session(session, arguments)).result()

    _posixsubprocess.fork_exec = session_fork_exec
    subprocess._fork_exec = session_fork_exec  # type: ignore[attr-defined]
    # From Python 3.13 on it would start most processes from the session's own thread, with the filter.
    subprocess._USE_POSIX_SPAWN = False  # type: ignore[misc]


def _install_system() -> None:
    plain = os.system

    def system(command: Any) -> int:
        if current_session() is None:
            return plain(command)
        code = subprocess.Popen(command, shell=True).wait()  # noqa: S602 (that is what os.system is)
        return -code if code < 0 else code << 8

    os.system = system


def _install_exec(runtime_pid: int) -> None:
    """`os.exec…` in a session must not replace the runtime: a subprocess runs, and its code is the script's."""

    def running(plain: Callable[..., Any], *, with_environment: bool) -> Callable[..., Any]:
        def execute(path: Any, argv: Sequence[Any], *environment: Any) -> Any:
            if current_session() is None or os.getpid() != runtime_pid:
                return plain(path, argv, *environment)
            variables = environment[0] if with_environment else None
            code = subprocess.Popen(list(argv), executable=path, env=variables, close_fds=False).wait()
            return os._exit(code if code >= 0 else 128 - code)

        return execute

    os.execv = running(os.execv, with_environment=False)
    os.execve = running(os.execve, with_environment=True)


def _install_posix_spawn() -> None:
    for name in ("posix_spawn", "posix_spawnp"):
        plain = getattr(os, name)

        def spawn(
            path: Any, argv: Any, env: Any, /, *, _plain: Any = plain, file_actions: Any = (), **options: Any
        ) -> Any:
            session = current_session()
            if session is not None:
                own = [(os.POSIX_SPAWN_DUP2, file, number) for number, file in enumerate(session.files)]
                file_actions = (*own, *file_actions)
            return _plain(path, argv, env, file_actions=file_actions, **options)

        setattr(os, name, spawn)


def _own_files_in_child() -> None:
    """In a forked child the session's files become descriptors 0, 1 and 2, as they would be."""
    session = current_session()
    if session is not None:
        for number, file in enumerate(session.files):
            _plain_dup2(file, number)


_plain_dup2 = os.dup2


def install_subprocesses() -> None:
    """Patch the ways to start a process."""
    _install_fork_exec(os.getpid())
    _install_system()
    _install_exec(os.getpid())
    _install_posix_spawn()
    os.register_at_fork(after_in_child=_own_files_in_child)
