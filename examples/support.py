"""What the examples share: options, and slow storage and network (real files and sockets, paced)."""

import argparse
import socket
import tempfile
import threading
import time

import muri


def option_parser(description: str, batch_size: int) -> argparse.ArgumentParser:
    """The options that every example takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=batch_size)
    parser.add_argument("--seed", type=int, default=0)
    return parser


class TokenBucket:
    """Lets `bytes_per_s` through on average; allowance that is not used is not kept."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = time.monotonic()

    def take(self, count: int) -> None:
        """Wait until `count` more bytes may pass."""
        now_s = time.monotonic()
        self._free_at_s = max(self._free_at_s, now_s) + count / self._bytes_per_s
        time.sleep(max(0.0, self._free_at_s - now_s))


class PacedFile:
    """A file of random-looking bytes, read round and round at a limited rate."""

    CHUNK_BYTES = 32 * 1024

    def __init__(self, size_bytes: int, bytes_per_s: float) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the object)
        self._file.write(bytes(range(256)) * (size_bytes // 256))
        self._file.flush()
        self._size_bytes, self._bucket = size_bytes // 256 * 256, TokenBucket(bytes_per_s)

    def read(self, count: int) -> bytearray:
        """Read `count` bytes in chunks; each chunk is a `load` stage, so others may come between."""
        data = bytearray()
        while len(data) < count:
            with muri.stage("load"):
                chunk = self._file.read(min(self.CHUNK_BYTES, count - len(data)))
                self._bucket.take(len(chunk))
            data += chunk
            if self._file.tell() >= self._size_bytes:
                self._file.seek(0)
        return data


class PacedLink:
    """A loopback connection with limited rate, to a thread that swallows what comes."""

    def __init__(self, bytes_per_s: float) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self._out = socket.create_connection(listener.getsockname())
        incoming, _ = listener.accept()
        listener.close()
        self._bucket = TokenBucket(bytes_per_s)
        threading.Thread(target=self._swallow, args=(incoming,), daemon=True).start()

    def send(self, data: bytes) -> None:
        """Send; returns when the rate allows the next one."""
        self._out.sendall(data)
        self._bucket.take(len(data))

    @staticmethod
    def _swallow(incoming: socket.socket) -> None:
        with incoming:
            while incoming.recv(1 << 16):
                pass
