"""Members with stages of exact durations, in real runtimes: normalized throughput of each way to run them."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from muri.group_spec import MemberSpec, group_of
from muri.policies.speed import Shape
from muri_lab.benchmarks.bounds import throughput_bound
from muri_lab.benchmarks.runtime_process import MURI_RUN, START_LIMIT_S, BenchmarkError, as_member, start_runtime

SCRIPT = Path(__file__).with_name("synthetic_job.py")
PIECE_S = 0.002
"""Between two yield points, as between two layers of a network; and between two grants of a plain process's lock."""

LEAST_ALONE = 0.97  # Below that the machine itself slows the members down, and figures would say nothing of the runtime
GOOD_WAYS = ("fair", "fair-processes", "auto-processes")
WAYS = ("plain", "lockstep", *GOOD_WAYS)
"""Plain processes without Muri; disciplines with members that are threads of the runtime, or processes."""

AUTO_SETTLES_S = 45.0
"""By then auto has found out what is best, wherever it started, and members' stages have found their rhythm."""


@dataclass(frozen=True, slots=True)
class ProfileSet:
    """Members that run together."""

    name: str  # For people
    stages_s: tuple[tuple[float, ...], ...]  # For each member its seconds of storage, CPU, GPU, network per iteration
    window_s: float  # How long iterations are counted
    warmup_s: float  # How long the members run before that
    pieces_s: tuple[float, ...] = ()  # per member, seconds between yield points; `PIECE_S` for all when empty
    promised: tuple[float, ...] = ()  # For each member the speed that it was promised; none for all when empty

    @property
    def lp_bound(self) -> float:
        """The largest total of normalized speeds."""
        return throughput_bound([Shape(stages, sum(stages)) for stages in self.stages_s])


def equal_iterations() -> ProfileSet:
    """Four bottlenecks of 70 %, iterations of 500 ms: each resource is wanted all of the time."""
    stages = tuple(tuple(float(s) for s in np.roll([0.35, 0.05, 0.05, 0.05], member)) for member in range(4))
    return ProfileSet("equal iterations", stages, window_s=10.0, warmup_s=4.0)


def unequal_iterations(seed: int) -> ProfileSet:
    """Four bottlenecks of 40 to 70 % drawn with the seed, iterations of 20 to 1,000 ms."""
    generator = np.random.default_rng(seed)
    bottlenecks, lengths_s = generator.permutation(4), generator.permutation((0.02, 0.1, 0.4, 1.0))
    members = []
    for bottleneck, length_s in zip(bottlenecks, lengths_s, strict=True):
        largest = generator.uniform(0.4, 0.7)
        others = generator.dirichlet([2.0] * 3) * (1 - largest)
        while others.max() >= largest:
            others = generator.dirichlet([2.0] * 3) * (1 - largest)
        shares = np.insert(others, bottleneck, largest)
        members.append(tuple(float(share) for share in shares * length_s))
    return ProfileSet(f"20 to 1,000 ms, seed {seed}", tuple(members), window_s=10.0, warmup_s=4.0)


def measure(profiles: ProfileSet, ways: Sequence[str], tell: Callable[[str], None]) -> dict[str, object]:
    """Return all figures of one set of members; speeds are relative to the stages' durations."""
    bound = profiles.lp_bound
    tell(f"{profiles.name}: alone")
    alone = run(profiles, "alone", prefetch=0)
    if min(alone) < LEAST_ALONE:
        raise BenchmarkError(
            f"the machine is too busy for exact durations: alone, on free resources, a member has {min(alone):.2f} of "
            f"its speed ({LEAST_ALONE} at least is needed); leave the machine alone and measure again"
        )
    result: dict[str, object] = {
        "stages_s": [list(stages) for stages in profiles.stages_s],
        "lp_bound": round(bound, 3),
        "alone_over_nominal": [round(speed, 3) for speed in alone],
        "sequential": {"total": 1.0},
    }
    for way in ways:
        tell(f"{profiles.name}: {way}")
        # The paper's rotation has a turn for loading; elsewhere the next batch is fetched meanwhile.
        speeds = run(profiles, way, prefetch=0 if way == "lockstep" else 1)
        total = sum(speeds)
        result[way] = {
            "members": [round(speed, 3) for speed in speeds],
            "total": round(total, 3),
            "ratio": round(total / bound, 3),
        }
    return result


def run(profiles: ProfileSet, way: str, prefetch: int) -> list[float]:
    """Normalized speeds of the members in one way of running them."""
    with tempfile.TemporaryDirectory(prefix="muri-", dir="/tmp") as name:
        folder = Path(name)
        runtime = _start_runtime(folder, way, profiles) if way not in {"alone", "plain"} else None
        jobs: list[subprocess.Popen[bytes]] = []
        try:
            warmup_s = AUTO_SETTLES_S if way.startswith("auto") else profiles.warmup_s
            window_s = 5.0 if way == "alone" else profiles.window_s
            begin_s = time.time() + 4.0 + warmup_s
            for member, stages in enumerate(profiles.stages_s):
                job = _profile(folder, member, stages, begin_s + window_s)
                if profiles.pieces_s:
                    job["piece_s"] = profiles.pieces_s[member]
                # Turns leave the locks free; without them, as `auto` may try, resources are exclusive all the same.
                job |= {"prefetch": prefetch, "locks": None if way == "alone" else name}
                jobs.append(_start_job(folder, member, job, attach=runtime is not None))
            _await(folder, jobs, begin_s + window_s + START_LIMIT_S)
            return [
                _speed(json.loads((folder / f"{member}.result").read_text()), sum(stages), begin_s)
                for member, stages in enumerate(profiles.stages_s)
            ]
        finally:
            for process in [*jobs, *([runtime] if runtime else [])]:
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=30)


def _profile(folder: Path, member: int, stages: Sequence[float], end_s: float) -> dict[str, object]:
    return {
        "stages_s": list(stages),
        "piece_s": PIECE_S,
        "end_s": end_s,
        "ready": str(folder / f"{member}.ready"),
        "result": str(folder / f"{member}.result"),
    }


def _environment(folder: Path, member: int | None) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "MURI_"))}
    return kept if member is None else kept | as_member(folder, str(101 + member))


def _start_runtime(folder: Path, way: str, profiles: ProfileSet) -> "subprocess.Popen[bytes]":
    discipline, _, kind = way.partition("-")
    isolation: Literal["thread", "process"] = "process" if kind == "processes" else "thread"
    members = tuple(
        MemberSpec(job_id=str(101 + member), solo_iteration_s=sum(stages), min_speed=promised, isolation=isolation)
        for member, (stages, promised) in enumerate(
            zip(profiles.stages_s, profiles.promised or [0.0] * len(profiles.stages_s), strict=True)
        )
    )
    rotation = tuple(None if each == "-" else each for each in _ordering(profiles))
    group = group_of({"members": members, "discipline": discipline, "ordering": rotation})
    return start_runtime(folder, group, "--preload", "", environment=_environment(folder, None))


def _ordering(profiles: ProfileSet) -> list[str]:
    """Members by position such that they are at their bottlenecks in the same step."""
    bottlenecks = [int(np.argmax(stages)) for stages in profiles.stages_s]
    return [str(101 + member) for member in np.argsort(bottlenecks)]


def _start_job(folder: Path, member: int, job: dict[str, object], *, attach: bool) -> "subprocess.Popen[bytes]":
    command = [*(MURI_RUN if attach else [sys.executable]), str(SCRIPT), json.dumps(job)]
    errors = (folder / f"{member}.err").open("wb")
    environment = _environment(folder, member if attach else None)
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=errors)


def _await(folder: Path, jobs: "Sequence[subprocess.Popen[bytes]]", end_s: float) -> None:
    for member, job in enumerate(jobs):
        try:
            code = job.wait(timeout=max(1.0, end_s - time.time()))
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(f"member {member} did not end in time") from error
        if code:
            raise BenchmarkError(f"member {member} failed ({code}): {(folder / f'{member}.err').read_text()}")


def _speed(ends_s: Sequence[float], solo_s: float, begin_s: float) -> float:
    """Iterations × their length alone / seconds from the first to the last end of one within the window."""
    counted = [end_s for end_s in ends_s if end_s >= begin_s]
    if len(counted) < 3:
        raise BenchmarkError(f"only {len(counted)} iterations of {solo_s:g} s ended in the window")
    return (len(counted) - 1) * solo_s / (counted[-1] - counted[0])
