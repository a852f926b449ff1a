"""The helper process of standard_files.py: `python c_output_helper.py CHANNEL RUNTIME_PID`.

For each session the runtime sends it the listener of the session's seccomp filter and the session's output files. It
answers the filter's notifications in a thread per session, so that a full pipe holds up no other session. It imports
nothing of Muri and ends after the runtime.
"""

import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import threading
from dataclasses import dataclass
from typing import Final

_RECEIVE: Final = 0xC0502100
_SEND: Final = 0xC0182101
_NOTIFICATION: Final = struct.Struct("QIIiIQ6Q")
_RESPONSE: Final = struct.Struct("QqiI")
_CONTINUE: Final = 1
_ENTRY: Final = struct.Struct("QQ")
_MOST_BYTES: Final = 1 << 20
"""A longer write is answered as a short one; C libraries go on with the rest."""


@dataclass(frozen=True, slots=True)
class Machine:
    """System call numbers, which differ between processor architectures."""

    audit: int
    write: int
    writev: int
    seccomp: int


MACHINES: Final = {
    "x86_64": Machine(audit=0xC000003E, write=1, writev=20, seccomp=317),
    "aarch64": Machine(audit=0xC00000B7, write=64, writev=66, seccomp=277),
}


class Vector(ctypes.Structure):
    """The kernel's iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t


def read_memory(pid: int, address: int, length: int) -> bytes:
    """Return bytes of another process; raise OSError if they cannot be read."""
    buffer = ctypes.create_string_buffer(length)
    here = Vector(ctypes.cast(buffer, ctypes.c_void_p), length)
    there = Vector(address, length)
    count = _libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if count < 0:
        raise OSError(ctypes.get_errno(), "process_vm_readv")
    return buffer.raw[:count]


def written_bytes(pid: int, machine: Machine, number: int, address: int, count: int) -> bytes:
    """The bytes that the stopped call wants to write."""
    if number == machine.write:
        return read_memory(pid, address, min(count, _MOST_BYTES)) if count else b""
    table = read_memory(pid, address, min(count, 1024) * _ENTRY.size) if count else b""
    parts, left = [], _MOST_BYTES
    for base, length in _ENTRY.iter_unpack(table):
        part = read_memory(pid, base, min(length, left)) if min(length, left) else b""
        parts.append(part)
        left -= len(part)
        if len(part) < length:
            break
    return b"".join(parts)


class Listener:
    """Answers one session's notifications."""

    def __init__(self, runtime_pid: int, machine: Machine, files: list[int]) -> None:
        self._pid = runtime_pid
        self._machine = machine
        self._listener, *self._outputs = files

    def serve(self) -> None:
        """Answer until no thread with the filter is left."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        try:
            while True:
                ((_, events),) = poll.poll()
                if events & select.POLLIN:
                    self._answer()
                elif events:
                    return
        finally:
            for file in (self._listener, *self._outputs):
                os.close(file)

    def _answer(self) -> None:
        message = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(self._listener, _RECEIVE, message)
        except OSError:  # the thread was killed in the meantime
            return
        ident, thread, _, number, _, _, file, address, count, *_ = _NOTIFICATION.unpack(message)
        try:
            # A forked process has the session's files as its own descriptors: its call goes on as it is.
            if not os.path.exists(f"/proc/{self._pid}/task/{thread}"):  # noqa: PTH110 (called for each write)
                response = _RESPONSE.pack(ident, 0, 0, _CONTINUE)
            else:
                data = written_bytes(self._pid, self._machine, number, address, count)
                response = _RESPONSE.pack(ident, os.write(self._outputs[file - 1], data), 0, 0)
        except OSError as error:
            unreadable = error.filename is None and error.strerror == "process_vm_readv"
            code = -(error.errno or 5)
            response = _RESPONSE.pack(ident, 0, 0, _CONTINUE) if unreadable else _RESPONSE.pack(ident, 0, code, 0)
        try:
            fcntl.ioctl(self._listener, _SEND, bytearray(response))
        except OSError:
            return


def main() -> None:
    """Take sessions until the runtime closes the channel, and serve them until their threads are gone."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[1]))
    runtime_pid, machine = int(sys.argv[2]), MACHINES[os.uname().machine]
    while True:
        name, files, _, _ = socket.recv_fds(channel, 4096, 3)
        if not name:
            return
        if len(files) == 3:
            threading.Thread(target=Listener(runtime_pid, machine, files).serve).start()


if __name__ == "__main__":
    main()
