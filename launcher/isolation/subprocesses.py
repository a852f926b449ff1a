"""Subprocesses get the session's environment and standard files."""

import _posixsubprocess
import subprocess
from typing import Any, Final

from muri.launcher.context import current_session

_ENVIRONMENT_ARGUMENT: Final = 5
_CHILD_FILE_ARGUMENTS: Final = (6, 9, 11)
"""Where `_posixsubprocess.fork_exec` takes the environment and the child's standard files."""


def install() -> None:
    """Patch the function under `subprocess` that makes the process."""
    fork_exec = _posixsubprocess.fork_exec

    def session_fork_exec(*arguments: Any) -> int:
        session = current_session()
        if session is not None:
            changed = list(arguments)
            if changed[_ENVIRONMENT_ARGUMENT] is None:
                changed[_ENVIRONMENT_ARGUMENT] = [k + b"=" + v for k, v in session.environment.items()]
            for index, file in zip(_CHILD_FILE_ARGUMENTS, session.files, strict=True):
                if changed[index] == -1:
                    changed[index] = file
            arguments = tuple(changed)
        return fork_exec(*arguments)

    _posixsubprocess.fork_exec = session_fork_exec
    subprocess._fork_exec = session_fork_exec  # type: ignore[attr-defined]
