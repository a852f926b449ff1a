"""Output that C code writes to descriptors 1 and 2 goes to the session's own files.

A seccomp filter on each session's thread (and those it starts) stops `write` and `writev` to 1 and 2. A helper
process, which needs nothing of this process's Python and can therefore never wait for it, reads the bytes and
writes them to the session's file. See seccomp_unotify(2).

A thread with such a filter, and processes forked from it, cannot gain rights through setuid programs;
processes that `subprocess` starts come from a thread without the filter. MURI_C_OUTPUT=0 in the runtime's
environment turns all this off.
"""

import ctypes
import logging
import os
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Final

from muri.launcher.context import SessionState
from muri.launcher.isolation import c_output_helper

logger = logging.getLogger("muri.launcher")

OFF_VARIABLE: Final = "MURI_C_OUTPUT"

_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_SET_PTRACER: Final = 0x59616D61
_SET_MODE_FILTER: Final = 1
_NEW_LISTENER: Final = 8
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_LINE_BUFFERED: Final = 1

_libc = ctypes.CDLL(None, use_errno=True)


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


class COutput:
    """The helper process and the way to it; without them, C output goes to the runtime's own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._told = False
        machine = c_output_helper.MACHINES.get(platform.machine())
        if os.environ.get(OFF_VARIABLE) == "0":
            self._told = True
        elif machine is None or not sys.platform.startswith("linux"):
            self._tell(f"unknown machine {platform.machine()}")
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
            self._tell(str(error))
            return
        finally:
            theirs.close()
        self._channel = ours
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(helper.pid), 0, 0, 0)
        threading.Thread(target=self._watch, args=(helper,), name="c-output", daemon=True).start()
        _buffer_by_line()

    def _watch(self, helper: "subprocess.Popen[bytes]") -> None:
        code = helper.wait()
        self._channel = None
        self._tell(f"its helper process ended with code {code}")

    def _tell(self, reason: str) -> None:
        if not self._told:
            self._told = True
            logger.warning("output of C code in the members' scripts goes to this log: %s", reason)

    def begin(self, session: SessionState) -> None:
        """Redirect the calling thread's C output, and that of threads and processes which it starts from now on."""
        channel = self._channel
        if channel is None:
            return
        with self._lock:
            _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            listener = _libc.syscall(self._seccomp_number, _SET_MODE_FILTER, _NEW_LISTENER, ctypes.byref(self._program))
            if listener < 0:
                self._tell(f"this kernel refuses the filter ({os.strerror(ctypes.get_errno())})")
                return
            try:
                socket.send_fds(channel, [session.member.encode()], [listener, session.files[1], session.files[2]])
            except OSError as error:
                self._tell(str(error))
            finally:
                os.close(listener)

    def close_in_child(self) -> None:
        """A forked process has nothing to say to the helper."""
        if self._channel is not None:
            self._channel.close()


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


def _buffer_by_line() -> None:
    """C's stdout must not keep one member's bytes until another one's thread writes them out."""
    stdout = ctypes.c_void_p.in_dll(_libc, "stdout")
    _libc.fflush(stdout)
    _libc.setvbuf(stdout, None, _LINE_BUFFERED, 0)


def _keep_own_log() -> None:
    """What the runtime logs in a session's thread is the runtime's: it goes by another descriptor."""
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(os.fdopen(os.dup(2), "w", buffering=1))


def install_c_output() -> COutput:
    """Start the helper; call before any session starts."""
    output = COutput()
    _keep_own_log()
    os.register_at_fork(after_in_child=output.close_in_child)
    return output
