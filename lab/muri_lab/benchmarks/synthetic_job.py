"""A training script whose stages take exact durations: sleeps in pieces, with a yield point after each.

    python benchmarks/synthetic_job.py '{"stages_s": [0.1, 0.02, 0.05, 0.03], "piece_s": 0.01, ...}'

A sleep that lasts too long is made up for in the next one of the same stage, so that durations hold on average. The
same script runs by itself, as one of several plain processes that share exclusive resources (`locks`: a
directory with a lock file for each), and as a member of a group. It notes when each iteration ended.
"""

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import muri

STAGES = ("load", "preprocess", "propagate", "synchronize")


class Resources:
    """What the stages use, when no runtime passes it on: a lock file each, or nothing."""

    def __init__(self, folder: str | None) -> None:
        self._files = [os.open(Path(folder) / stage, os.O_RDWR | os.O_CREAT) if folder else None for stage in STAGES]

    @contextlib.contextmanager
    def used(self, stage: int) -> Iterator[None]:
        """Hold the resource for one piece of work."""
        file = self._files[stage]
        if file is None:
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


class Work:
    """Sleeps of exact total length."""

    def __init__(self, profile: dict, resources: Resources) -> None:
        self._stages_s, self._piece_s = profile["stages_s"], profile["piece_s"]
        self._debt_s = [0.0] * len(STAGES)
        self._resources = resources

    def do(self, stage: int) -> None:
        """Work for one stage's duration, in pieces."""
        left_s = self._stages_s[stage]
        while left_s > 1e-9:
            piece_s = min(self._piece_s, left_s)
            with self._resources.used(stage):
                begin_s = time.perf_counter()
                time.sleep(max(0.0, piece_s - self._debt_s[stage]))
                self._debt_s[stage] += time.perf_counter() - begin_s - piece_s
            left_s -= piece_s
            if left_s > 1e-9:
                muri.yield_point()


class Loader:
    """Batches that take the duration of the stage `load`."""

    def __init__(self, work: Work, end_s: float) -> None:
        self._work, self._end_s = work, end_s

    def __iter__(self) -> Iterator[int]:
        """Batches until the time is over."""
        index = 0
        while time.time() < self._end_s:
            self._work.do(0)
            yield index
            index += 1


def main() -> None:
    """Iterate until the end of the measurement; write when each iteration ended."""
    profile = json.loads(sys.argv[1])
    work = Work(profile, Resources(profile["locks"]))
    ends_s: list[float] = []
    Path(profile["ready"]).touch()
    for _ in muri.batches(Loader(work, profile["end_s"]), prefetch=profile["prefetch"]):
        for stage in (1, 2, 3):
            with muri.stage(STAGES[stage]):
                work.do(stage)
        ends_s.append(time.time())
    Path(profile["result"]).write_text(json.dumps(ends_s), encoding="utf-8")


main()
