"""Profiles a zoo of small networks with real training, for the predictor to learn from."""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import torch
from torch import Tensor

from muri.launcher.job.stage_clock import IterationRecord, StageClock
from muri.profiler.records import STAGES, ProfileDetail, ProfileKey, StageProfile
from muri.profiler.resource_usage.sample import Usage
from muri.profiler.resource_usage.sampler import Sampler
from muri.profiler.store import ProfileStore
from muri.units import GIB
from muri_lab.benchmarks.zoo_data import Records, loader, preprocess
from muri_lab.benchmarks.zoo_models import Entry, zoo
from muri_lab.prediction.features import put_features
from muri_lab.prediction.graph import features_of

LOAD, PREPROCESS, PROPAGATE, _ = range(len(STAGES))
CPU_NODE = "cpu"
"""The GPU type under which a node without GPU is entered."""
_SCHEDULER = Path("/proc/thread-self/schedstat")  # ns on a core, ns waiting for one, turns


class Effort(NamedTuple):
    """How long a configuration is measured: until both minima are reached, or the maximum."""

    warmup: int = 4
    least_iterations: int = 20
    least_s: float = 0.4
    most_s: float = 3.0

    def enough(self, iterations: int, elapsed_s: float) -> bool:
        """Whether to stop."""
        reached = iterations >= self.least_iterations and elapsed_s >= self.least_s
        return reached or elapsed_s >= self.most_s


class OwnTime:
    """A clock of what this thread itself took: its CPU time, and what it waited for storage.

    On a CPU that others use too, wall-clock time says more about them than about the model: a thread that may run
    but has to wait for a core is not counted.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0

    def __call__(self) -> float:
        """Seconds so far."""
        return time.thread_time() + self._waited_s

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count wall-clock time meanwhile, less the wait for a core."""
        began_s = self._elsewhere_s()
        try:
            yield
        finally:
            self._waited_s += max(0.0, self._elsewhere_s() - began_s)

    @staticmethod
    def _elsewhere_s() -> float:
        """Seconds that this thread neither ran nor wanted to."""
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        runnable_ns = int(_SCHEDULER.read_text().split()[1])
        return wall_s - cpu_s - runnable_ns / 1e9


class Training:
    """A real training loop with its stages marked."""

    def __init__(self, entry: Entry, samples: Records, device: torch.device) -> None:
        torch.manual_seed(6)
        self.records: list[IterationRecord] = []
        self._entry, self._device = entry, device
        self._model = entry.build().to(device)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9)
        self._own_time = None if device.type == "cuda" else OwnTime()
        self._clock = StageClock(on_iteration=self.records.append, now=self._own_time or time.perf_counter)
        self._random = np.random.default_rng(6)
        self._batches = self._endless(samples)

    def _endless(self, samples: Records) -> Iterator[list[bytes]]:
        while True:
            yield from loader(samples, self._entry.batch_size)

    def iterate(self) -> None:
        """One iteration; it is counted when the next one begins."""
        waiting = self._own_time.waiting() if self._own_time else nullcontext()
        with self._stage(LOAD), waiting:
            raw = next(self._batches)
        with self._stage(PREPROCESS):
            inputs = preprocess(self._entry, raw, self._random)
        with self._stage(PROPAGATE):
            self._step(inputs)

    @contextmanager
    def _stage(self, stage: int) -> Iterator[None]:
        self._clock.enter(stage)
        try:
            yield
        finally:
            self._clock.leave()

    def _step(self, inputs: Tensor) -> None:
        """Forward, backward, step; ends when the device is done."""
        self._optimizer.zero_grad(set_to_none=True)
        scores = self._model(inputs.to(self._device))
        scores.square().mean().backward()
        self._optimizer.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure(entry: Entry, data: Path, device: torch.device, effort: Effort) -> StageProfile:
    """Train a configuration for some iterations and take the medians after the warm-up."""
    samples = Records(data, entry.kind)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        training = Training(entry, samples, device)
        for _ in range(effort.warmup + 1):  # the first iteration is counted when the second begins
            training.iterate()
        training.records.clear()
        with Sampler(os.getpid()) as sampler:
            began_s = time.perf_counter()
            while not effort.enough(len(training.records), time.perf_counter() - began_s):
                training.iterate()
            usage = sampler.stop()
    finally:
        samples.close()
    return _profile(entry, training.records, device, usage)


def _profile(entry: Entry, records: list[IterationRecord], device: torch.device, usage: Usage) -> StageProfile:
    """Medians, so that what else runs on the machine shows little; GPU figures only of a GPU."""
    cuda = device.type == "cuda"
    stage_s = [statistics.median(record.stage_s[index] for record in records) for index in range(len(STAGES))]
    iteration_s = max(sum(stage_s), statistics.median(record.iteration_s for record in records))
    detail = ProfileDetail(
        gpu_utilisation=usage.mean.gpu_utilisation if cuda else None,
        cpu_cores=usage.mean.cpu_cores,
        host_mem_gib=usage.peak.host_mem_gib,
        iteration_cv=statistics.pstdev(record.iteration_s for record in records)
        / statistics.fmean(record.iteration_s for record in records),
        warmup_iterations=Effort().warmup,
    )
    return StageProfile(
        key(entry, device),
        *stage_s,
        iteration_s,
        gpu_mem_gib=torch.cuda.max_memory_allocated(device) / GIB if cuda else 0.0,
        iterations=len(records),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        detail=detail,
    )


def key(entry: Entry, device: torch.device) -> ProfileKey:
    """Under what an entry is stored."""
    gpu_type = torch.cuda.get_device_name(device).lower().replace(" ", "-") if device.type == "cuda" else CPU_NODE
    return ProfileKey(entry.name, entry.batch_size, 1, gpu_type)


def example_inputs(entry: Entry) -> tuple[Tensor, ...]:
    """Inputs of the right shape and type, on the meta device."""
    dtype = torch.int64 if entry.kind in {"tokens", "clicks"} else torch.float32
    return (torch.empty((entry.batch_size, *entry.shape), dtype=dtype, device="meta"),)


def chosen_device() -> torch.device:
    """The first GPU, else the CPU with one thread, the one whose time `OwnTime` tells."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    torch.set_num_threads(1)
    return torch.device("cpu")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--store", "store_path", required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--only", default="", help="Only models whose name contains this.")
@click.option("--features-only", is_flag=True, help="Don't train; only tell the features anew.")
@click.option("--data-dir", type=click.Path(file_okay=False, exists=True, path_type=Path), default=Path())
def main(store_path: Path, only: str, features_only: bool, data_dir: Path) -> None:
    """Profile the zoo on this machine's GPU, or on a core of its CPU, into a profile store.

    \b
    Examples:
      python -m muri_lab.benchmarks.profile_zoo --store zoo.db                all: five minutes on a CPU
      python -m muri_lab.benchmarks.profile_zoo --store zoo.db --only lstm

    On a CPU, times are those of the thread itself: CPU seconds, and its waits for the disk.
    The samples lie in a folder of some MiB in --data-dir (default: here), which is removed at the end.
    """
    device = chosen_device()
    entries = [entry for entry in zoo() if only in entry.name]
    with ProfileStore(store_path) as store, tempfile.TemporaryDirectory(dir=data_dir, prefix="zoo-") as data:
        for number, entry in enumerate(entries, 1):
            put_features(store, key(entry, device), features_of(entry.build(), example_inputs(entry)))
            told = ""
            if not features_only:
                profile = measure(entry, Path(data), device, Effort())
                store.put(profile)
                shares = ", ".join(f"{seconds / profile.iteration_s:.2f}" for seconds in profile.stage_s)
                told = f"{profile.iteration_s * 1e3:.2f} ms over {profile.iterations}, shares {shares}"
            click.echo(f"[{number}/{len(entries)}] {entry.name} batch {entry.batch_size}: {told}", err=True)


if __name__ == "__main__":
    main()
