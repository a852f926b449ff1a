"""A training loop whose stage times are known: it sleeps, computes, or reads at a limited rate."""

import argparse
import hashlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import muri

SPIN_S = 0.0015
CHUNK_BYTES = 64 * 1024
BLOCK = bytes(256 * 1024)  # long enough for another thread to wake up and take the lock
LONG_S = 0.001
STAGES = ("preprocess", "propagate", "synchronize")


def sleep(length_s: float) -> None:
    """Take exactly so long, mostly asleep; the last bit is waited for awake, since sleeping overshoots."""
    until_s = time.perf_counter() + length_s
    time.sleep(max(0.0, length_s - SPIN_S))
    while time.perf_counter() < until_s:
        time.sleep(0)  # lets other threads have the interpreter


def compute(length_s: float) -> None:
    """Take exactly so long, computing outside of the interpreter's lock, as PyTorch does."""
    until_s = time.perf_counter() + length_s
    while time.perf_counter() < until_s:
        hashlib.sha256(BLOCK if until_s - time.perf_counter() > LONG_S else BLOCK[:4096])


class PacedReader:
    """Reads a real file at a limited rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the object)
        self._file.write(bytes(8 << 20))
        self._bytes_per_s = bytes_per_s

    def __call__(self, length_s: float) -> None:
        """Read what the rate allows in that time."""
        start_s, done, count = time.perf_counter(), 0, int(length_s * self._bytes_per_s)
        self._file.seek(0)
        while done < count:
            chunk = self._file.read(min(CHUNK_BYTES, count - done))
            if not chunk:
                self._file.seek(0)
            done += len(chunk)
            sleep(start_s + done / self._bytes_per_s - time.perf_counter())


def batches(load_s: float, how: str, warmup: int, iterations: int) -> Iterator[int]:
    """Batches that take a known time to load; the first are slow, as caches are cold then."""
    read = PacedReader(50e6) if how == "read" else sleep
    for step in range(iterations):
        read(load_s * (4 if step < warmup else 1))
        yield step


def main() -> None:
    """Run until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages_ms", type=float, nargs=4)
    parser.add_argument("--load", choices=["sleep", "read"], default="sleep")
    parser.add_argument("--prefetch", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--log", help="own stopwatch: when each iteration began, a line each")
    parser.add_argument("--iterations", type=int, default=100_000)
    options = parser.parse_args()
    load_s, *rest_s = (value / 1000 for value in options.stages_ms)
    source = batches(load_s, options.load, options.warmup, options.iterations)
    log = Path(options.log or "/dev/null").open("w", buffering=1)  # noqa: SIM115 (open as long as the job runs)
    for _ in muri.batches(source, prefetch=options.prefetch):
        log.write(f"{time.perf_counter()}\n")
        for stage, length_s, work in zip(STAGES, rest_s, (compute, compute, sleep), strict=True):
            with muri.stage(stage):
                work(length_s)


if __name__ == "__main__":
    main()
