"""The machine of a measurement, stored with every figure."""

import os
import platform
import resource
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, object]:
    """CPU, cores, Python, and the commit with "+" when files differ from it."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else ""),
    }


def peak_rss_mib() -> float:
    """Most memory that this process ever held."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def measured(work: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """CPU seconds of some work, its own figures, and the process's memory."""
    start_s = time.process_time()
    own = work() or {}
    return {"cpu_s": round(time.process_time() - start_s, 3), "peak_rss_mib": peak_rss_mib(), **own}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _git(*arguments: str) -> str:
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"
