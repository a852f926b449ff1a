"""Cost of a group's runtime by itself: with idle members, and for each hand-over of a resource.

Hand-overs are measured twice: as the machine is, and beside a busy loop on each core in another session.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import quantiles
from typing import Any, Final

import psutil

from muri.clock import MIB
from muri.group_spec import GroupSpec, MemberSpec
from muri_lab.benchmarks.bars import measured
from muri_lab.benchmarks.runtime_process import MURI_RUN, START_LIMIT_S, BenchmarkError, as_member, start_runtime

IDLE_S: Final = 30.0
SETTLE_S: Final = 3.0  # The members' start is over by then
SWITCHES: Final = 1_500  # How often each of two members takes the resource

_SCRIPT: Final = """
import sys, time
open(sys.argv[1], "w").close()
time.sleep(1000)
"""


def idle() -> dict[str, Any]:
    """CPU use and memory of a runtime, without its members' scripts, while these sleep."""
    ids = ["101", "102"]
    group = GroupSpec(members=tuple(MemberSpec(job_id=each, isolation="process") for each in ids))
    with tempfile.TemporaryDirectory(prefix="muri-", dir="/tmp") as name, ExitStack() as started:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(_SCRIPT, encoding="utf-8")
        runtime = start_runtime(folder, group)
        started.callback(_end, runtime)
        for job_id in ids:
            started.callback(_end, _member(folder, script, job_id))
        _await([folder / job_id for job_id in ids])
        time.sleep(SETTLE_S)
        process = psutil.Process(runtime.pid)
        own = [process, *process.children()]
        before_s, begin_s = _cpu_s(own), time.monotonic()
        time.sleep(IDLE_S)
        used_s, passed_s = _cpu_s(own) - before_s, time.monotonic() - begin_s
        memory = process.memory_full_info()
        return {
            "cpu_s": round(used_s, 3),
            "cpu_percent": round(100 * used_s / passed_s, 3),
            "peak_rss_mib": round(memory.rss / MIB, 1),
            "pss_mib": round(memory.pss / MIB, 1),
        }


def _member(folder: Path, script: Path, job_id: str) -> "subprocess.Popen[bytes]":
    with (folder / "members.err").open("ab") as err:
        command, env = [*MURI_RUN, str(script), str(folder / job_id)], os.environ | as_member(folder, job_id)
        return subprocess.Popen(command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stderr=err)


def _await(ready: list[Path]) -> None:
    end_s = time.monotonic() + START_LIMIT_S
    while not all(each.exists() for each in ready):
        if time.monotonic() > end_s:
            raise BenchmarkError("the members' scripts did not start")
        time.sleep(0.1)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    process.wait(timeout=60)


def _cpu_s(processes: list[psutil.Process]) -> float:
    times = [each.cpu_times() for each in processes]
    return sum(each.user + each.system for each in times)


def between_threads() -> dict[str, Any]:
    """Two members that are threads of one process."""
    from muri_lab.benchmarks.interleaving_overhead import hand_overs_s  # here: its imports count in no other row

    return hand_overs(hand_overs_s)


def between_processes() -> dict[str, Any]:
    """Two members with processes of their own."""
    from muri_lab.benchmarks.switch_cost import measure_switches_s

    return hand_overs(measure_switches_s)


def hand_overs(measure: Callable[[int], list[float]]) -> dict[str, Any]:
    """Microseconds from release to the next holder at work, and of this process's CPU for each, quiet and loaded."""
    from muri.launcher.sessions.setup import take_short_turns

    take_short_turns()  # as a runtime does
    measure(100)  # what is imported late is imported now
    quiet = measured(lambda: _figures("", measure(SWITCHES)))
    with _busy_cores():
        loaded = _figures("loaded_", measure(SWITCHES))
    return {**quiet, **loaded}


def _figures(prefix: str, spans_s: list[float]) -> dict[str, Any]:
    cuts = quantiles(spans_s, n=100)
    us = {"p50_us": cuts[49] * 1e6, "p99_us": cuts[98] * 1e6}
    return {f"{prefix}count": len(spans_s), **{f"{prefix}{name}": round(value, 1) for name, value in us.items()}}


@contextlib.contextmanager
def _busy_cores() -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command, start_new_session=True) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


ROWS: Final[dict[str, tuple[Callable[[], dict[str, Any]], dict[str, float]]]] = {
    "runtime-idle": (idle, {"cpu_percent": 0.3, "peak_rss_mib": 150.0}),
    "hand-over-threads": (between_threads, {"p50_us": 50.0}),
    "hand-over-processes": (between_processes, {"p50_us": 100.0}),
}
"""Each row, and the most that its figures may be."""
