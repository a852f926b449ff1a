"""What `muri run` costs a script: of each iteration, and until its first line.

The same training loop runs in three processes: under plain Python, under `muri run` alone, and under `muri run` as the
only member of a group, where hooks find its stages and it asks for each resource. They train in turns, a block each, on
one core, so that what disturbs the machine falls on all; each block is compared with the plain one of its round.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median, quantiles
from typing import IO, Any

import click

from muri.group_spec import GroupSpec, MemberSpec
from muri_lab.benchmarks.bars import Bar, finish, tell
from muri_lab.benchmarks.runtime_process import MURI_RUN, BenchmarkError, socket_folder, start_runtime

RESULT = Path(__file__).parent / "results" / "run_overhead.json"
JOB = Path(__file__).with_name("run_overhead_job.py")
MEMBER = "101"
WAYS = ("plain", "muri run", "member")
ITERATION_S = 0.022
"""The promise is for iterations of 20 ms and more."""
CALIBRATION = (8, 20)
BLOCK_S = 0.6
STARTS = 10
END_S = 30.0
KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_MMAP_THRESHOLD_": str(1 << 34)}
"""For all three ways: else it depends on the layout of each process's heap whether the C library gives the tensors'
memory back after each iteration, and plain processes of the same script differ by 40 %."""
LARGEST_RATIO = {"muri run": 1.01, "member": 1.02}
"""The promise is for `muri run` alone; a member is measured as well, which costs about 0.3 ms of each iteration."""
LONGEST_START_S = 1.0

Block = tuple[float, float]
"""Seconds of an iteration, on the clock and of the CPU."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a script is started: what stands before it, and its variables."""

    prefix: tuple[str, ...]
    environment: Mapping[str, str]


class Trainer:
    """A training process that trains a block when it is told to."""

    def __init__(self, name: str, way: Way, folder: Path) -> None:
        self._name = name
        pipes = [folder / f"{name}.{kind}".replace(" ", "-") for kind in ("commands", "answers")]
        for pipe in pipes:
            os.mkfifo(pipe)
        self._process = subprocess.Popen([*way.prefix, str(JOB), "0", *map(str, pipes)], env=way.environment)
        self._commands: IO[str] = pipes[0].open("w", buffering=1)
        self._answers: IO[str] = pipes[1].open()

    def train(self, batch_size: int, iterations: int) -> Block:
        """Train a block.

        Raises:
            BenchmarkError: The process has ended.
        """
        self._commands.write(f"{batch_size} {iterations}\n")
        words = self._answers.readline().split()
        if len(words) != 2:
            raise BenchmarkError(f"{self._name}: the script ended with {self._process.wait(END_S)}")
        return float(words[0]), float(words[1])

    def close(self) -> None:
        """End it."""
        self._commands.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()


@contextmanager
def ways(folder: Path) -> Iterator[dict[str, Way]]:
    """The ways to start a script, with a runtime for the member."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MURI_"))}
    plain |= {"OMP_NUM_THREADS": "1"} | KEEPS_MEMORY
    runtime = start_runtime(folder, GroupSpec(members=(MemberSpec(MEMBER),)), "--preload", "", environment=plain)
    member = plain | {"MURI_RUN_DIR": str(socket_folder(folder)), "SLURM_JOB_ID": MEMBER}
    try:
        yield {
            "plain": Way((sys.executable,), plain),
            "muri run": Way(MURI_RUN, plain),
            "member": Way(MURI_RUN, member),
        }
    finally:
        runtime.terminate()
        runtime.wait(END_S)


def measure_starts(found: Mapping[str, Way], folder: Path, starts: int) -> dict[str, list[float]]:
    """Seconds from the start of each way to a script's first line, and in turns."""
    script, stamp = folder / "first_line.py", folder / "first_line"
    script.write_text(f"import time; now_s = time.monotonic(); open({str(stamp)!r}, 'w').write(str(now_s))\n")
    spans: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(starts):
        for name, way in found.items():
            begin_s = time.monotonic()
            subprocess.run([*way.prefix, str(script)], env=way.environment, check=True)
            spans[name].append(float(stamp.read_text()) - begin_s)
    return spans


def measure_blocks(
    found: Mapping[str, Way], folder: Path, seconds: float, tell_progress: Callable[[str], None]
) -> dict[str, list[Block]]:
    """Blocks of each way, in turns; each round begins with another one."""
    trainers: dict[str, Trainer] = {}
    blocks: dict[str, list[Block]] = {name: [] for name in found}
    try:
        for name, way in found.items():
            trainers[name] = Trainer(name, way, folder)
        for trainer in trainers.values():
            trainer.train(*CALIBRATION)  # imports, caches, and the group's own measuring
        batch_size, iterations = _block_of(trainers["plain"])
        tell_progress(f"overhead: blocks of {iterations} iterations with {batch_size} images each")
        end_s = time.monotonic() + seconds
        for first in cycle(range(len(trainers))):
            names = [*trainers][first:] + [*trainers][:first]
            for name in names:
                blocks[name].append(trainers[name].train(batch_size, iterations))
            if time.monotonic() > end_s:
                return blocks
        raise AssertionError("cycle has no end")
    finally:
        for trainer in trainers.values():
            trainer.close()


def _block_of(trainer: Trainer) -> tuple[int, int]:
    """How many images make an iteration long enough, and how many iterations a block."""
    batch_size, iterations = CALIBRATION
    while (iteration_s := min(trainer.train(batch_size, iterations)[0] for _ in range(3))) < ITERATION_S:
        batch_size = max(batch_size + 1, round(batch_size * ITERATION_S / iteration_s * 1.05))
    return batch_size, max(5, round(BLOCK_S / iteration_s))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = quantiles(values, n=4)
    return {"median": round(middle, 4), "quartile_1": round(low, 4), "quartile_3": round(high, 4)}


def figures(blocks: Mapping[str, Sequence[Block]], starts: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """What was measured, each way against plain Python in the same round."""
    plain, others = blocks["plain"], [name for name in blocks if name != "plain"]
    return {
        "rounds": len(plain),
        "iteration_ms": round(median(wall_s for wall_s, _ in plain) * 1e3, 2),
        "wall_ratio": {
            name: spread([a[0] / b[0] for a, b in zip(blocks[name], plain, strict=True)]) for name in others
        },
        "cpu_ratio": {name: spread([a[1] / b[1] for a, b in zip(blocks[name], plain, strict=True)]) for name in others},
        "starts": len(starts["plain"]),
        "start_s": {name: round(median(spans), 3) for name, spans in starts.items()},
        "later_start_s": {
            name: spread([a - b for a, b in zip(starts[name], starts["plain"], strict=True)]) for name in others
        },
    }


def bars(found: Mapping[str, Any]) -> list[Bar]:
    """What the figures have to reach."""
    ratios, later = found["wall_ratio"], found["later_start_s"]
    return [
        *(_bar(f"{name}: iteration / plain", each["median"], LARGEST_RATIO[name]) for name, each in ratios.items()),
        *(_bar(f"{name}: seconds later", each["median"], LONGEST_START_S) for name, each in later.items()),
    ]


def _bar(what: str, value: float, limit: float) -> Bar:
    return Bar("overhead", what, value, f"< {limit:g}", value < limit)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seconds", default=180.0, show_default=True, help="How long blocks are trained.")
@click.option("--json", "as_json", is_flag=True, help="Print what was measured as JSON.")
@click.option("--write/--no-write", "stored", default=False, help="Keep it in benchmarks/results/run_overhead.json.")
def main(seconds: float, as_json: bool, stored: bool) -> None:
    """Measure what `muri run` costs; exit with 1 if a bar is missed. About four minutes; leave the machine alone."""
    try:
        with tempfile.TemporaryDirectory(prefix="muri-", dir="/tmp") as name, ways(Path(name)) as found:
            starts = measure_starts(found, Path(name), STARTS)
            blocks = measure_blocks(found, Path(name), seconds, tell)
    except BenchmarkError as error:
        raise click.ClickException(str(error)) from error
    result = figures(blocks, starts)
    if not as_json:
        tell(json.dumps(result, indent=1))
    finish(RESULT, {"overhead": result}, bars(result), stored=stored, as_json=as_json)


if __name__ == "__main__":
    main()
