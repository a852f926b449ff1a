"""Runs a script for which time goes on while it computes, sleeps or waits for its peer, not while others compute.

Run as `python own_time.py SCRIPT …`, in place of `muri run SCRIPT …`; for scripts whose stages are those of one thread.
A sleep takes no real time.
"""

import runpy
import time

from torch._C._distributed_c10d import Work

passed_s = [0.0]


def own_time() -> float:
    """Seconds of computing, sleeping and waiting."""
    return time.thread_time() + sum(passed_s)


def sleep(seconds: float) -> None:
    """Let time go on."""
    passed_s[0] += seconds


def wait(work: Work, *arguments: object, plain: object = Work.wait) -> object:
    """What `Work.wait` does; the time in which this thread doesn't compute is that of waiting."""
    began_s = time.clock_gettime(time.CLOCK_MONOTONIC) - time.thread_time()
    try:
        return plain(work, *arguments)
    finally:
        sleep(time.clock_gettime(time.CLOCK_MONOTONIC) - time.thread_time() - began_s)


if __name__ == "__main__":
    time.perf_counter = time.monotonic = own_time
    time.sleep, Work.wait = sleep, wait
    runpy.run_module("muri.launcher.script.solo", run_name="__main__", alter_sys=True)
