"""Check a runtime for leaks: thousands of scripts run one after the other in each of four members.

The sessions are real; a thread that speaks its protocol stands for each `muri run`, whose start would dominate.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from muri.clock import MIB
from muri.group_spec import GroupSpec, MemberSpec
from muri.launcher import protocol
from muri.launcher.protocol import AttachRequest
from muri_lab.benchmarks.runtime_process import BenchmarkError, socket_folder, start_runtime

MEMBERS = ("101", "102", "103", "104")
WARMUP_SHARE = 0.2

_SCRIPT = """
import atexit, os, sys, threading, muri, helper
kept = {"text": helper.block(), "thread": threading.Thread(target=lambda: None)}
kept["thread"].start()
atexit.register(lambda: None)
for batch in muri.batches(range(3), prefetch=int(sys.argv[1]) % 2):
    with muri.stage("propagate"):
        pass
if int(sys.argv[1]) % 7 == 0:
    raise SystemExit(3)
if int(sys.argv[1]) % 11 == 0:
    raise ValueError("a script that fails")
print("done")
"""
_HELPER = "def block():\n    return bytearray(100_000)\n"


@dataclass(frozen=True, slots=True)
class Held:
    """What the runtime's process holds."""

    threads: int
    files: int
    memory_mib: float


def measure(starts: int, tell: Callable[[str], None]) -> dict[str, object]:
    """Start and end that many scripts; what the runtime held after the warm-up, and at the end."""
    with tempfile.TemporaryDirectory(prefix="muri-", dir="/tmp") as name:
        folder = Path(name)
        (folder / "train.py").write_text(_SCRIPT, encoding="utf-8")
        (folder / "helper.py").write_text(_HELPER, encoding="utf-8")
        group = GroupSpec(members=tuple(MemberSpec(job_id=job_id, isolation="thread") for job_id in MEMBERS))
        runtime = start_runtime(folder, group, "--preload", "")
        try:
            warmup = int(starts * WARMUP_SHARE)
            _run(folder, 0, warmup)
            before = held(runtime.pid)
            tell(f"soak: after {warmup} starts {before}")
            begin_s = time.perf_counter()
            for first in range(warmup, starts, warmup):
                _run(folder, first, min(first + warmup, starts))
                tell(f"soak: after {min(first + warmup, starts)} starts {held(runtime.pid)}")
            elapsed_s = time.perf_counter() - begin_s
            after = held(runtime.pid)
        finally:
            runtime.send_signal(signal.SIGTERM)
            runtime.wait(timeout=30)
    return {
        "starts": starts,
        "warmup_starts": warmup,
        "threads": [before.threads, after.threads],
        "files": [before.files, after.files],
        "memory_mib": [round(before.memory_mib, 1), round(after.memory_mib, 1)],
        "memory_growth": round(after.memory_mib / before.memory_mib - 1, 4),
        "start_to_end_ms": round(elapsed_s / (starts - warmup) * len(MEMBERS) * 1e3, 1),
    }


def _run(folder: Path, first: int, end: int) -> None:
    """Scripts number `first` to `end`, spread over the members."""
    errors: list[str] = []

    def member(index: int) -> None:
        for number in range(first + index, end, len(MEMBERS)):
            expected = 3 if number % 7 == 0 else 1 if number % 11 == 0 else 0
            code = _attach(folder, MEMBERS[index], number)
            if code != expected:
                errors.append(f"script {number} ended with {code}, not {expected}")
                return

    threads = [threading.Thread(target=member, args=(index,)) for index in range(len(MEMBERS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise BenchmarkError(f"{errors[0]}: {(folder / 'out').read_text()[-2000:]}")


def _attach(folder: Path, member: str, number: int) -> int:
    request = AttachRequest(
        job_id=member,
        target=str(folder / "train.py"),
        module=False,
        arguments=(str(number),),
        cwd=str(folder),
        environment=dict(os.environ),
        umask=0o077,
        executable=sys.executable,
        prefix=sys.prefix,
        python=sys.version,
    )
    connection = protocol.connect(protocol.pilot_socket(socket_folder(folder), protocol.NO_JOB))
    if connection is None:
        raise BenchmarkError("the runtime is gone")
    with connection, (folder / "out").open("ab") as out, Path(os.devnull).open("rb") as null:
        protocol.send_with_files(connection, request.to_frame(), (null.fileno(), out.fileno(), out.fileno()))
        frame = protocol.receive(connection)
    if frame is None:
        raise BenchmarkError("the connection broke")
    if frame["type"] != "exit":
        raise BenchmarkError(f"the runtime answered {frame}")
    return int(frame["code"])


def held(pid: int) -> Held:
    """Once the last threads have ended."""
    process = psutil.Process(pid)
    least = Held(10**6, 10**6, 0.0)
    for _ in range(20):
        now = Held(process.num_threads(), process.num_fds(), process.memory_info().rss / MIB)
        least = Held(min(least.threads, now.threads), min(least.files, now.files), now.memory_mib)
        time.sleep(0.05)
    return least
