"""What an interpreter without its global lock (GIL) buys: members whose preprocessing is Python code.

    scripts/free-threaded run -m muri_lab.benchmarks.free_threading --json     # two to three minutes

Needs a free-threaded build of Python, which runs with the lock and without (`PYTHON_GIL`). The same job runs alone,
four times as plain processes, and four times as members (threads) of one runtime. What it printed is kept in
benchmarks/results/free_threading.json.
"""

import argparse
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from muri_lab.benchmarks.job_runs import Setting, running
from muri_lab.benchmarks.machine import describe_machine

MEMBERS = 4
SCRIPT = Path(__file__).parent / "python_job.py"


@dataclass(frozen=True)
class Way:
    """How the job runs.

    Attributes:
        count: How often at once.
        gil: Whether the interpreter has its lock.
        discipline: The runtime's; None for plain processes.
    """

    count: int
    gil: bool
    discipline: str | None = None


WAYS: Mapping[str, Way] = {
    "alone, GIL": Way(1, gil=True),
    "alone": Way(1, gil=False),
    "processes, GIL": Way(MEMBERS, gil=True),
    "processes": Way(MEMBERS, gil=False),
    "plain, GIL": Way(MEMBERS, gil=True, discipline="plain"),
    "plain": Way(MEMBERS, gil=False, discipline="plain"),
    "fair, GIL": Way(MEMBERS, gil=True, discipline="fair"),
    "fair": Way(MEMBERS, gil=False, discipline="fair"),
}


@contextmanager
def _lock(gil: bool) -> Iterator[None]:
    """Processes started within have the lock or not."""
    os.environ["PYTHON_GIL"] = str(int(gil))
    try:
        yield
    finally:
        del os.environ["PYTHON_GIL"]


def iterations_per_s(way: Way, seconds: float, data: Path) -> float:
    """Of all the jobs together."""
    setting = Setting(data, {f"job{number}": [str(SCRIPT)] for number in range(way.count)}, seconds)
    with _lock(way.gil), running(setting) as run:
        if way.discipline is None:
            for job in setting.jobs:
                run.start_job(job)
        else:
            solo_s = dict.fromkeys(setting.jobs, 0.05)
            run.start_interleaved(solo_s, "--preload", "", discipline=way.discipline)
        return sum(run.measure().values())


def measure(rounds: int, seconds: float, tell: Callable[[str], None]) -> dict[str, list[float]]:
    """Iterations per second of each way in each round; the ways take turns, so that a disturbance hits all alike."""
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as data:
        for _ in range(rounds):
            for name, way in WAYS.items():
                found[name].append(round(iterations_per_s(way, seconds, Path(data)), 2))
                tell(f"{name}: {found[name][-1]} iterations/s")
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="window of each run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way runs (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        print("this Python always has its lock: use scripts/free-threaded run -m muri_lab.benchmarks.free_threading",
              file=sys.stderr)  # fmt: skip
        return 2
    found = measure(options.rounds, options.seconds, lambda line: print(line, file=sys.stderr, flush=True))
    medians = {name: median(rates) for name, rates in found.items()}
    totals = {name: round(rate / medians["alone, GIL"], 2) for name, rate in medians.items()}
    if options.json:
        print(json.dumps({"machine": describe_machine(), "members": MEMBERS, "load_at_end": os.getloadavg()[0],
                          "iterations_per_s": found, "normalized_throughput": totals}, indent=1))  # fmt: skip
    else:
        for name, total in totals.items():
            print(f"{name:16} {medians[name]:7.1f} iterations/s  {total:5.2f} × alone with GIL")
    return 0


if __name__ == "__main__":
    sys.exit(main())
