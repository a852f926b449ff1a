"""The helper process of standard_files.py: `python c_output_helper.py CHANNEL RUNTIME_PID`.

For each session the runtime sends it the listener of the session's seccomp filter and the session's output files. It
answers the filter's notifications in a thread per session, so that a full pipe holds up no other session. It imports
nothing of Muri and ends after the runtime.
"""

import contextlib
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


def read_memory(pid: int, address: int, length: int) -> bytes:
    """Return bytes of another process; raise OSError if they cannot be read."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123 (called for each write)
        return os.pread(memory.fileno(), length, address)


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


def _write(file: int, data: bytes) -> tuple[int, int]:
    """Write bytes; return how many, and the kernel's negative number of an error."""
    try:
        return os.write(file, data), 0
    except OSError as error:
        return 0, -(error.errno or 5)


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
        response = _RESPONSE.pack(ident, 0, 0, _CONTINUE)  # the call goes on as it is, where the bytes cannot be read
        # Another process that was started here has the session's files as its own descriptors.
        if os.path.exists(f"/proc/{self._pid}/task/{thread}"):  # noqa: PTH110 (called for each write)
            with contextlib.suppress(OSError):
                data = written_bytes(self._pid, self._machine, number, address, count)
                response = _RESPONSE.pack(ident, *_write(self._outputs[file - 1], data), 0)
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._listener, _SEND, bytearray(response))


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
