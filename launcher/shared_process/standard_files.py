"""Standard files: streams, descriptors 0 to 2 and the output of C code lead to the session's own files.

`sys.stdin`, `stdout` and `stderr` are proxies, and functions that take a descriptor by number translate it. C code is
reached by a seccomp filter on each session's thread (and those it starts), which stops `write` and `writev` to 1 and 2.
A helper process reads the bytes and writes them to the session's file; as a process of its own it never waits for this
one's interpreter. See seccomp_unotify(2).
"""

import builtins
import ctypes
import io
import logging
import os
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

from muri.launcher.shared_process import c_output_helper
from muri.launcher.shared_process.state import SessionState, StandIn, add_properties, current_session, handed_on

logger = logging.getLogger("muri.launcher")

_BY_NUMBER: Final = (
    *("read", "write", "readv", "writev", "dup", "fstat", "fsync", "isatty", "lseek", "ttyname", "get_blocking"),
    *("set_blocking", "get_inheritable", "set_inheritable", "fdatasync", "ftruncate", "tcgetpgrp"),
)
"""Functions of `os` with a descriptor as first argument."""

_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_SET_PTRACER: Final = 0x59616D61
_SET_MODE_FILTER: Final = 1
_NEW_LISTENER: Final = 8
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_LINE_BUFFERED: Final = 1


class _Stream(StandIn):
    """Stands for sys.stdin, stdout or stderr."""

    __next__, __enter__, __exit__ = map(handed_on, ("__next__", "__enter__", "__exit__"))


def _install_stream(name: str) -> property:
    """Put proxies in place of a stream; return a property: the one that the script has put in place, else its own."""
    plain = getattr(sys, name)

    def read_own() -> Any:
        session = current_session()
        return plain if session is None else session.streams[name]

    own = _Stream(read_own)
    process: Any = own  # what is in place outside of sessions

    def get(_module: ModuleType) -> Any:
        session = current_session()
        return process if session is None else session.replaced.get(name, own)

    def read() -> Any:
        stream = get(sys)
        return io.StringIO() if stream is None else stream  # None: print says nothing

    def put(_module: ModuleType, value: Any) -> None:
        nonlocal process
        session = current_session()
        if session is None:
            process = value
        elif value is own:
            session.replaced.pop(name, None)
        else:
            session.replaced[name] = value

    # The interpreter itself (print, input, tracebacks) reads the module's dictionary.
    sys.__dict__[name] = _Stream(read)
    sys.__dict__[f"__{name}__"] = own
    return property(get, put)


def install_streams() -> None:
    """Put proxies in place of the process's streams."""
    add_properties(sys, {name: _install_stream(name) for name in ("stdin", "stdout", "stderr")})


def own_file(number: Any) -> Any:
    """Return the descriptor that a number stands for in the calling thread."""
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


def install_file_numbers() -> None:
    """Patch the functions that take a descriptor: descriptors 0 to 2 are the runtime's, one set per process."""
    for name in _BY_NUMBER:
        setattr(os, name, _translating(getattr(os, name)))
    plain_dup2, plain_close, plain_open = os.dup2, os.close, io.open

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

    def session_open(file: Any, *args: Any, **kwargs: Any) -> Any:
        own = own_file(file)
        if own != file:  # closing it must not close the session's own file
            closefd = kwargs.get("closefd", args[5] if len(args) > 5 else True)
            own = os.dup(own) if closefd else own
        return plain_open(own, *args, **kwargs)

    session_open.__name__, session_open.__doc__ = "open", plain_open.__doc__
    os.dup2, os.close = dup2, close  # type: ignore[assignment]
    builtins.open = io.open = session_open


_libc = ctypes.CDLL(None, use_errno=True)


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


class COutput:
    """The helper process and the channel to it; without them, C output goes to the runtime's own output."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._reported = False
        machine = c_output_helper.MACHINES.get(platform.machine())
        if machine is None:
            self._report(f"unknown machine {platform.machine()}")
        else:
            self._program = _program(machine)
            self._seccomp_number = machine.seccomp
            self._start_helper()

    def _start_helper(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-I", "-S", c_output_helper.__file__, str(theirs.fileno()), str(os.getpid())]
        try:
            helper = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            self._report(str(error))
            return
        finally:
            theirs.close()
        self._channel = ours
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(helper.pid), 0, 0, 0)
        threading.Thread(target=self._watch, args=(helper,), name="c-output", daemon=True).start()
        # By line: otherwise C's stdout keeps one member's bytes until another member's thread flushes it.
        stdout = ctypes.c_void_p.in_dll(_libc, "stdout")
        _libc.fflush(stdout)
        _libc.setvbuf(stdout, None, _LINE_BUFFERED, 0)

    def _watch(self, helper: "subprocess.Popen[bytes]") -> None:
        code = helper.wait()
        self._channel = None
        self._report(f"its helper process ended with code {code}")

    def _report(self, reason: str) -> None:
        if not self._reported:
            self._reported = True
            logger.warning("output of C code in the members' scripts goes to this log: %s", reason)

    def begin(self, session: SessionState) -> None:
        """Redirect the calling thread's C output, and that of threads which it starts from now on."""
        channel = self._channel
        if channel is None:
            return
        with self._lock:
            _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            listener = _libc.syscall(self._seccomp_number, _SET_MODE_FILTER, _NEW_LISTENER, ctypes.byref(self._program))
            if listener < 0:
                self._report(f"this kernel refuses the filter ({os.strerror(ctypes.get_errno())})")
                return
            try:
                socket.send_fds(channel, [session.member.encode()], [listener, session.files[1], session.files[2]])
            except OSError as error:
                self._report(str(error))
            finally:
                os.close(listener)


def _program(machine: c_output_helper.Machine) -> _Program:
    """Notify about write and writev of this machine's calls to descriptors 1 and 2; allow everything else."""
    code: Sequence[tuple[int, int, int, int]] = (
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 0, 7, machine.audit),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_EQUAL, 1, 0, machine.write),
        (_JUMP_EQUAL, 0, 4, machine.writev),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_JUMP_EQUAL, 1, 0, 1),
        (_JUMP_EQUAL, 0, 1, 2),
        (_RETURN, 0, 0, _NOTIFY),
        (_RETURN, 0, 0, _ALLOW),
    )
    instructions = (_Instruction * len(code))(*(_Instruction(*fields) for fields in code))
    return _Program(len(code), instructions)


def install_c_output() -> COutput:
    """Start the helper; call before any session starts."""
    output = COutput()
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler):  # a log in a session's thread belongs to the runtime
            handler.setStream(os.fdopen(os.dup(2), "w", buffering=1))
    return output
