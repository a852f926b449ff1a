"""File descriptors 0, 1 and 2 of a session are its own files, whoever names them by number."""

import builtins
import io
import os
from collections.abc import Callable
from typing import Any, Final

from muri.launcher.context import current_session

_BY_NUMBER: Final = (
    *("read", "write", "readv", "writev", "dup", "fstat", "fsync", "isatty", "lseek", "ttyname", "get_blocking"),
    *("set_blocking", "get_inheritable", "set_inheritable", "fdatasync", "ftruncate", "tcgetpgrp"),
)
"""Functions of `os` whose first argument is a descriptor."""


def own_file(number: Any) -> Any:
    """The descriptor that a number means for the calling thread."""
    if type(number) is int and 0 <= number <= 2:
        session = current_session()
        if session is not None:
            return session.files[number]
    return number


def _translating(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(fd: Any, /, *args: Any, **kwargs: Any) -> Any:
        return plain(own_file(fd), *args, **kwargs)

    call.__name__, call.__doc__ = plain.__name__, plain.__doc__
    return call


def _patch_os() -> None:
    for name in _BY_NUMBER:
        if hasattr(os, name):
            setattr(os, name, _translating(getattr(os, name)))
    plain_dup2, plain_close = os.dup2, os.close

    def dup2(fd: int, fd2: int, inheritable: bool = True) -> int:
        target = own_file(fd2)
        plain_dup2(own_file(fd), target, inheritable and target == fd2)
        return fd2

    def close(fd: int, /) -> None:
        target = own_file(fd)
        if target == fd:
            plain_close(fd)
            return
        null = os.open(os.devnull, os.O_RDWR)  # the number stays the session's own
        plain_dup2(null, target, False)
        plain_close(null)

    os.dup2, os.close = dup2, close  # type: ignore[assignment]


def _patch_open() -> None:
    plain_open = io.open

    def session_open(file: Any, *args: Any, **kwargs: Any) -> Any:
        own = own_file(file)
        if own != file:  # closing it must not close the session's own file
            closefd = kwargs.get("closefd", args[5] if len(args) > 5 else True)
            own = os.dup(own) if closefd else own
        return plain_open(own, *args, **kwargs)

    session_open.__name__, session_open.__doc__ = "open", plain_open.__doc__
    builtins.open = io.open = session_open


def install_file_numbers() -> None:
    """Patch the functions that take a descriptor."""
    _patch_os()
    _patch_open()
