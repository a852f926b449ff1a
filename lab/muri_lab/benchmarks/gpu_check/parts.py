"""The parts of the check, and how they are run: each in a process of its own, within its time."""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import psutil

from muri_lab.benchmarks.gpu_check import device, training
from muri_lab.benchmarks.gpu_check.check import Check, Figures
from muri_lab.benchmarks.gpu_check.page import lines_of

GRACE_S = 8.0


@dataclass(frozen=True)
class Part:
    """One part."""

    file: str  # Its results go to gpu-FILE.json
    run: Callable[[Check, Figures], None]  # Does it
    needs_stages: bool = False  # Whether it has to know each model alone


PARTS: Mapping[str, Part] = {
    "losses": Part("losses", training.losses),
    "stages": Part("stages", training.stages),
    "bottlenecks": Part("throughput", training.throughput("bottlenecks"), needs_stages=True),
    "errors": Part("errors", device.errors),
    "demo": Part("demo", training.demo("with Muri", "four at once"), needs_stages=True),
    "demo-alone": Part("demo", training.demo("one by one"), needs_stages=True),
    "hand-over": Part("hand-over", device.hand_over),
    "gpu-bound": Part("throughput", training.throughput("gpu-bound"), needs_stages=True),
    "memory": Part("memory", device.memory),
    "nvml": Part("nvml", device.nvml),
    "small": Part("throughput", training.throughput("small"), needs_stages=True),
}
"""The most telling ones first: the time may not suffice for the last."""

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([device.__name__, training.__name__])


def run_part(check: Check, name: str) -> None:
    """Do one part in a process of its own, and end it with the exit code."""
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its jobs are ended
    figures = Figures(check, PARTS[name].file)
    begin_s = time.monotonic()
    try:
        PARTS[name].run(check, figures)
    except SystemExit:
        figures.add(f"failed: {name}", "it was ended before it was done")
        raise
    except Exception as error:
        figures.add(f"failed: {name}", f"{type(error).__name__}: {error}"[-2000:])
        sys.exit(1)
    finally:
        figures.add(f"seconds: {name}", round(time.monotonic() - begin_s, 1))
    sys.exit(int(figures.failed))


def start_part(check: Check, name: str, limit_s: float) -> bool:
    """Run one part in a process of its own, ended with its children at the time limit; return whether it finished."""
    process = _PROCESSES.Process(target=run_part, args=(check, name))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        started = _started_by(process.pid)
        process.terminate()
        process.join(GRACE_S)
        process.kill()
        for each in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.join()
    return process.exitcode == 0


def _started_by(pid: int | None) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def do_parts(check: Check, names: Sequence[str], end_s: float) -> list[str]:
    """Do parts one after the other, at two places in a smoke run; returns those that failed."""
    done: dict[str, Future[bool]] = {}
    said: set[str] = set()
    order = sorted(names, key=lambda name: (name != "stages", PARTS[name].needs_stages)) if check.smoke else names

    def do(name: str) -> bool:
        if PARTS[name].needs_stages and "stages" in done:
            done["stages"].result()
        left_s = end_s - time.monotonic() - GRACE_S
        begin_s = time.monotonic()
        went_well = left_s > GRACE_S and start_part(check, name, min(check.part_limit_s, left_s))
        text = f"{time.monotonic() - begin_s:.0f} s" if left_s > GRACE_S else "no time was left"
        found = lines_of(PARTS[name].file, check.earlier(PARTS[name].file))
        fresh = [line for line in found if line not in said]
        said.update(fresh)
        print("\n".join([f"\n{name}: {'done' if went_well else 'FAILED'}, {text}", *fresh]), flush=True)
        return went_well

    with ThreadPoolExecutor(2 if check.smoke else 1) as pool:
        for name in order:
            done[name] = pool.submit(do, name)
        try:
            return [name for name in names if not done[name].result()]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
