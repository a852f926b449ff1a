"""Tells whoever measures a script from outside when its iterations end, without slowing it."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from muri.launcher.clock import StageClock
from muri.launcher.task import task_of
from muri.profiler.dryrun.messages import ITERATION_LOG_VARIABLE


def log_iterations(clock: StageClock, environment: Mapping[str, str]) -> None:
    """Append a line at each iteration's end to the file that the environment names, if it does.

    Of several ranks the first one does. Nothing waits for the GPU: it is meant for throughput over seconds.
    """
    path = environment.get(ITERATION_LOG_VARIABLE)
    if not path or task_of(environment)[0] != 0:
        return
    try:
        stream = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115 -- open as long as the script
    except OSError as error:
        print(f"muri: iterations are not logged: {path}: {error.strerror}", file=sys.stderr)
        return
    clock.at_boundary.append(lambda: print(f"{time.perf_counter():.6f}", file=stream))
