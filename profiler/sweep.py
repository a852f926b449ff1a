"""The measurements of a sweep: a script's throughput on a number of CPUs, and the bandwidth of its dataset's storage.

A dry run stops when its means are sure, and leaves far-off iterations out of them. Both mislead here: a loader's
workers deliver in bursts, and the throughput depends on the pauses between them. So iterations over time count, and
nothing in the script is timed or waited for. The kernel enforces the number of CPUs by affinity, which all threads and
processes of the script inherit without any privilege, as under Slurm's task/affinity.
"""

import errno
import math
import mmap
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import BinaryIO, Final

from muri.clock import GIB, MIB
from muri.profiler.dryrun.messages import ITERATION_LOG_VARIABLE, DryRunResult, Limits, StampReader
from muri.profiler.dryrun.runner import (
    DryRunFailedError,
    check_command,
    end,
    measure_script,
    start,
    wait_until,
    with_last_words,
)
from muri.profiler.errors import SensitivityError
from muri.profiler.sensitivity import Dataset, Measured, measured_overlap

STEADY_S: Final = 3.0
LEAST_ITERATIONS: Final = 3
_BLOCKS: Final = 8
THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
CPUS_VARIABLE: Final = "MURI_CPUS"
"""Tells the script how many CPUs it has, for the number of its loader's workers."""

Launch = Callable[[Mapping[str, str], BinaryIO], "subprocess.Popen[bytes]"]

PLACEHOLDER: Final = "{cpus}"
"""Stands for the CPU count in the script's arguments, such as `--workers {cpus}`."""

UNSEEN_SHARE: Final = 0.01
"""Reading that takes a smaller share of the iteration does not show how it overlaps."""

_WARMUP_ITERATIONS: Final = 10
_BATCHES_AHEAD: Final = 2
"""Batches that each loader worker prefetches (PyTorch's default); the loader's pace shows after them."""

CHUNK_BYTES: Final = 4 * MIB
READ_LIMIT_MIB: Final = 512.0
READ_LIMIT_S: Final = 3.0
_SEED: Final = 1
_REFUSALS: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)


def usable_cpus() -> int:
    """How many cores this process and its children may use."""
    return len(os.sched_getaffinity(0))


def cores(count: int) -> frozenset[int]:
    """The lowest numbers of so many cores that this process may use (SensitivityError: there are fewer)."""
    usable = sorted(os.sched_getaffinity(0))
    if not 1 <= count <= len(usable):
        raise SensitivityError(f"{count} CPUs were asked for; this process may use 1 to {len(usable)}")
    return frozenset(usable[:count])


def environment(count: int, base: Mapping[str, str]) -> dict[str, str]:
    """The variables of a job on so many CPUs: as many threads, and the count itself."""
    return {**base, **dict.fromkeys((*THREAD_VARIABLES, CPUS_VARIABLE), str(count))}


@dataclass(frozen=True, slots=True)
class Window:
    """How long a script is watched."""

    steady_s: float  # Seconds after the warm-up; more where they hold fewer than three iterations
    # First iterations that are left out, or those of the first `steady_s` if that is sooner
    warmup_iterations: int
    time_limit_s: float = 300.0  # Most seconds in all, with start-up

    @classmethod
    def of_workers(cls, count: int, steady_s: float, time_limit_s: float = 300.0) -> "Window":
        """That of a script with a loader worker on each of so many CPUs: their prefetched batches are warm-up."""
        return cls(steady_s, _WARMUP_ITERATIONS + _BATCHES_AHEAD * count, time_limit_s)

    def start_index(self, stamps_s: Sequence[float]) -> int:
        """The index of the end of an iteration with which the window begins; beyond the last during warm-up."""
        by_time = next((n for n, at_s in enumerate(stamps_s) if at_s - stamps_s[0] >= self.steady_s), len(stamps_s))
        return min(by_time, self.warmup_iterations)

    def is_over(self, stamps_s: Sequence[float]) -> bool:
        """Whether enough is known."""
        first = self.start_index(stamps_s)
        counted = len(stamps_s) - 1 - first
        return counted >= LEAST_ITERATIONS and stamps_s[-1] - stamps_s[first] >= self.steady_s


def watched_throughput(launch: Launch, environment: Mapping[str, str], window: Window) -> Measured:
    """Count the iterations of what is launched, and end it.

    Args:
        launch: Starts it, as the leader of a session, in the environment and with the output that it is given.
        environment: To which the place of the iteration log is added.
        window: How long.

    Raises:
        DryRunFailedError: It failed, never iterated or took too long; the message has its last words.
    """
    with tempfile.TemporaryDirectory(prefix="muri-sensitivity-") as folder:
        log, output = Path(folder, "iterations"), Path(folder, "output")
        stamps = StampReader(log)
        with output.open("wb") as stream:
            process = launch({**environment, ITERATION_LOG_VARIABLE: str(log)}, stream)
            try:
                wait_until(process, window.time_limit_s, lambda: window.is_over(stamps.read()))
                stamps_s = stamps.read()
            finally:
                end(process)
        counted = stamps_s[window.start_index(stamps_s) :]
        if len(counted) <= LEAST_ITERATIONS:
            raise DryRunFailedError(with_last_words(_why(process.returncode, len(stamps_s), window), output))
        return throughput_of(counted)


def throughput_of(stamps_s: Sequence[float]) -> Measured:
    """Iterations over time, and how sure that is.

    The standard error is that of the means of a few blocks of iterations: it knows of bursts and drifts that
    are shorter than a block, which the scatter of single iterations does not.
    """
    times_s = [after_s - before_s for before_s, after_s in pairwise(stamps_s)]
    size = max(1, len(times_s) // _BLOCKS)
    blocks = [fmean(times_s[begin : begin + size]) for begin in range(0, len(times_s) - size + 1, size)]
    mean_s = (stamps_s[-1] - stamps_s[0]) / len(times_s)
    error_s = stdev(blocks) / math.sqrt(len(blocks)) if len(blocks) > 1 else 0.0
    return Measured(1 / mean_s, error_s / mean_s)


def _why(code: int, iterations: int, window: Window) -> str:
    if code > 0:
        return f"no throughput: the script failed with exit code {code} after {iterations} iterations"
    needed = window.warmup_iterations + LEAST_ITERATIONS + 1
    advice = "let it run longer" if iterations else "mark its iterations with muri.batches(loader) or stages"
    return f"no throughput: {iterations} iterations were seen, up to {needed} are needed; {advice}"


@dataclass(frozen=True, slots=True)
class ScriptMeter:
    """Measures one script on different CPU counts."""

    command: Sequence[str]  # The script and its arguments; `{cpus}` in them is the count
    pinned: bool  # Whether the kernel enforces the count; otherwise the script is only told
    steady_s: float  # Seconds of steady work in one measurement
    tell: Callable[[int, Measured], None]  # Called with each measurement

    def __call__(self, cpus: int) -> Measured:
        """Throughput on so many CPUs.

        Raises:
            SensitivityError: There are fewer.
            NoScriptError: There is no such script.
            DryRunFailedError: It failed or never iterated.
        """
        command = self._command(cpus)
        check_command(command)
        measured = watched_throughput(
            lambda variables, stream: start(command, variables, stream, cpus=self._cores(cpus)),
            environment(cpus, os.environ),
            Window.of_workers(cpus, self.steady_s),
        )
        self.tell(cpus, measured)
        return measured

    def dry_run(self, cpus: int) -> DryRunResult:
        """Where the time and the memory go on so many CPUs (DryRunFailedError: the script failed or never iterated)."""
        return measure_script(
            self._command(cpus),
            cpus=self._cores(cpus),
            environment=environment(cpus, os.environ),
            limits=Limits(steady_s=self.steady_s),
        )

    def _command(self, cpus: int) -> tuple[str, ...]:
        return tuple(word.replace(PLACEHOLDER, str(cpus)) for word in self.command)

    def _cores(self, cpus: int) -> frozenset[int] | None:
        return cores(cpus) if self.pinned else None


def overlap_seen(result: DryRunResult) -> float | None:
    """The share of its reading that a script hid in a dry run; None if it hardly read."""
    busy_s = result.detail.busy_s
    if busy_s is None or busy_s[0] < UNSEEN_SHARE * result.iteration_s:
        return None
    return measured_overlap(result.iteration_s, result.stage_s[0], busy_s[0])


def files_of(dataset: Path) -> tuple[Path, ...]:
    """All files of a dataset, in the order of their names (SensitivityError: there are none)."""
    if dataset.is_file():
        return (dataset,)
    if not dataset.exists():
        raise SensitivityError(f"there is no dataset {dataset}; give a file or a folder")
    found = tuple(sorted(path for path in dataset.rglob("*") if path.is_file()))
    if not found:
        raise SensitivityError(f"the folder {dataset} holds no files that may be read")
    return found


def measure_bandwidth(files: Sequence[Path]) -> float:
    """MiB per second of reading files in a shuffled order, as training does, until a limit is reached.

    Raises:
        SensitivityError: Nothing could be read.
    """
    shuffled = list(files)
    random.Random(_SEED).shuffle(shuffled)
    read_bytes = 0
    begin_s = time.perf_counter()
    with mmap.mmap(-1, CHUNK_BYTES) as buffer:  # O_DIRECT needs memory at the start of a page
        for path in shuffled:
            fd = _open(path)
            try:
                while count := os.readv(fd, [buffer]):
                    read_bytes += count
                    spent_s = time.perf_counter() - begin_s
                    if read_bytes >= READ_LIMIT_MIB * MIB or spent_s >= READ_LIMIT_S:
                        return read_bytes / MIB / spent_s
            except OSError as error:
                raise SensitivityError(f"cannot read {path}: {error.strerror}") from error
            finally:
                os.close(fd)
    if not read_bytes:
        raise SensitivityError(f"the {len(files)} files of the dataset are empty")
    return read_bytes / MIB / (time.perf_counter() - begin_s)


def _open(path: Path) -> int:
    """Open past the page cache, or without the file's pages in it where the file system has no O_DIRECT."""
    try:
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise SensitivityError(f"cannot read {path}: {error.strerror}") from error
    return fd


MEMORY_KEYS: Final = ("dataset", "dataset-gib", "storage-mib-per-s", "batch-mib", "overlap")
"""Options of the memory axis: the dataset's files, or its size in place of them; the bandwidth of its storage, else
measured on them; the MiB that an iteration reads; the share of reading that the job hides, else measured."""


@dataclass(frozen=True, slots=True)
class MemoryAxis:
    """How the memory axis is to be computed."""

    batch_mib: float  # What one iteration reads
    path: Path | None = None  # The dataset's files; None where size and bandwidth are given
    dataset_gib: float | None = None  # Size of the dataset; None: that of its files
    storage_mib_per_s: float | None = None  # Bandwidth of its storage; None: measured on its files
    overlap: float | None = None  # Share of reading that the job hides; None: as its dry run shows

    @classmethod
    def from_words(cls, words: str) -> "MemoryAxis":
        """Return the axis that KEY=VALUE,... means.

        Raises:
            SensitivityError: A key or value is wrong, or there are not enough.
        """
        given: dict[str, str] = {}
        for word in words.split(","):
            key, _, value = word.partition("=")
            if key not in MEMORY_KEYS or not value:
                raise SensitivityError(f"{word!r} says nothing of memory; give KEY=VALUE of {', '.join(MEMORY_KEYS)}")
            given[key] = value
        path = Path(given["dataset"]) if "dataset" in given else None
        missing = [] if "batch-mib" in given else ["batch-mib (batch size × mean size of a sample)"]
        if path is None:
            missing += [f"dataset or {key}" for key in ("dataset-gib", "storage-mib-per-s") if key not in given]
        if missing:
            raise SensitivityError(f"the memory axis also needs {', '.join(missing)}")
        try:
            figures = {key.replace("-", "_"): float(value) for key, value in given.items() if key != "dataset"}
        except ValueError as error:
            raise SensitivityError(f"of memory {words!r} a value is not a number: {error}") from error
        return cls(path=path, **figures)

    def measure(self) -> Dataset:
        """Measure what was not given.

        Raises:
            SensitivityError: The files cannot be read, or a given figure cannot be true.
        """
        files = () if self.path is None else files_of(self.path)
        gib = sum(path.stat().st_size for path in files) / GIB if self.dataset_gib is None else self.dataset_gib
        rate = measure_bandwidth(files) if self.storage_mib_per_s is None else self.storage_mib_per_s
        return Dataset(gib, self.batch_mib, rate, 1.0 if self.overlap is None else self.overlap)

    def with_overlap(self, dataset: Dataset, measured: float | None) -> Dataset:
        """The dataset with the overlap that its job showed; one that was given counts more.

        Without either, reading is taken to overlap, as it does with a loader that has workers.
        """
        return dataset if self.overlap is not None or measured is None else replace(dataset, overlap=measured)
