"""What happens over time: waiting jobs, GPUs in use, busy resources, stays on GPUs."""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Generic, TypeVar

from muri.profiler.records import RESOURCES
from muri.simulator.model import GroupSpan, Sample, Simulation

MAX_SAMPLES: Final = 2_000
"""Most samples of a result; beyond it, neighbors are merged into time-weighted means."""

LEAST_REMAINING_S: Final = 1.0
"""Least remaining time in the blocking index: without it, a job stopped just before its end would dominate the mean."""


class Samples:
    """Samples in order of time, thinned on the way so that long traces need no more memory."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """Add one more."""
        self._samples.append(sample)
        if len(self._samples) >= 2 * MAX_SAMPLES:
            self._samples = _thinned(self._samples)

    def thinned(self) -> tuple[Sample, ...]:
        """The samples so far, at most `MAX_SAMPLES`."""
        samples = self._samples
        while len(samples) > MAX_SAMPLES:
            samples = _thinned(samples)
        return tuple(samples)


Stay = TypeVar("Stay", bound=Hashable)


class Film(Generic[Stay], ABC):
    """Records a public simulator's model over time: samples, stays on GPUs, progress."""

    def __init__(self, task: Simulation, report_every: int) -> None:
        self.task = task
        self.with_spans = task.with_spans
        self._report_every = report_every
        self._samples = Samples()
        self._looks = 0
        self._open: dict[Stay, GroupSpan] = {}
        self._closed: list[GroupSpan] = []

    @abstractmethod
    def _end_s(self, key: Stay) -> float:
        """When a stay has ended that is over now."""

    @abstractmethod
    def _done(self) -> float:
        """Share of the jobs that have ended."""

    def note(self, sample: Sample) -> None:
        """Add a sample, and report progress at times."""
        self._samples.add(sample)
        self._looks += 1
        if self.task.progress is not None and self._looks % self._report_every == 0:
            self.task.progress(self._done())

    def note_stays(self, stays: Mapping[Stay, GroupSpan]) -> None:
        """Note the stays on GPUs, as spans that begin now; those that go on keep their beginning."""
        self._close(self._open.keys() - stays.keys())
        self._open = {key: self._open.get(key, span) for key, span in stays.items()}

    def samples(self) -> tuple[Sample, ...]:
        """The samples, thinned; to be asked for at the end."""
        if self.task.progress is not None:
            self.task.progress(1.0)
        return self._samples.thinned()

    def spans(self) -> tuple[GroupSpan, ...]:
        """All stays; to be asked for at the end."""
        self._close(self._open.keys())
        return tuple(sorted(self._closed, key=lambda span: (span.start_s, span.members)))

    def _close(self, keys: Iterable[Stay]) -> None:
        self._closed += [replace(self._open[key], end_s=self._end_s(key)) for key in keys]


class Meter:
    """Adds up the present state, and turns it into samples as time passes."""

    def __init__(self, gpu_count: int, used: Sequence[Sequence[float]], most: float = math.inf) -> None:
        self._gpu_count = gpu_count
        self._used = used
        self._most = most
        self._samples = Samples()
        self._busy = [0.0] * len(RESOURCES)
        self._pending = 0
        self._per_s = 0.0  # Σ 1 / remaining, and Σ since / remaining: the index at any time is linear in both
        self._offset = 0.0
        self._speeds = 0.0
        self.gpus_held = 0
        self.gpu_s = 0.0
        self.service_s = 0.0
        """Seconds of service of all jobs together, including those lost in failures."""

    def pass_time(self, start_s: float, end_s: float) -> None:
        """Add a sample for a time in which nothing changes."""
        length_s = end_s - start_s
        if length_s <= 0:
            return
        self.gpu_s += length_s * self.gpus_held
        self.service_s += length_s * self._speeds
        middle_s = start_s + length_s / 2
        blocking = max(0.0, middle_s * self._per_s - self._offset) / self._pending if self._pending else 0.0
        utilization = tuple([min(self._most, max(0.0, busy / self._gpu_count)) for busy in self._busy])
        assert len(utilization) == 4
        self._samples.add(Sample(start_s, length_s, self._pending, blocking, self.gpus_held, utilization))

    def wait(self, since_s: float, remaining_s: float) -> None:
        """A job begins to wait."""
        weight = 1.0 / max(LEAST_REMAINING_S, remaining_s)
        self._pending += 1
        self._per_s += weight
        self._offset += weight * since_s

    def leave(self, since_s: float, remaining_s: float) -> None:
        """The same job ends its wait."""
        weight = 1.0 / max(LEAST_REMAINING_S, remaining_s)
        self._pending -= 1
        self._per_s -= weight
        self._offset -= weight * since_s
        if not self._pending:  # what rounding left over
            self._per_s = self._offset = 0.0

    def speed_up(self, shape: int, gpu_count: int, change: float) -> None:
        """A job's speed changes, and with it the resources that it keeps busy."""
        self._speeds = max(0.0, self._speeds + change)
        for resource, share in enumerate(self._used[shape]):
            self._busy[resource] += change * share * gpu_count

    def count_less(self, resource: int, amount: float) -> None:
        """A resource is less busy than the jobs' speeds say, by this many GPUs' worth."""
        self._busy[resource] -= amount

    def samples(self) -> tuple[Sample, ...]:
        """The samples so far, thinned."""
        return self._samples.thinned()


def _thinned(samples: Sequence[Sample]) -> list[Sample]:
    """Half as many samples: neighbors become one with time-weighted means."""
    merged = [_merged(first, second) for first, second in zip(samples[::2], samples[1::2], strict=False)]
    return [*merged, samples[-1]] if len(samples) % 2 else merged


def _merged(first: Sample, second: Sample) -> Sample:
    length_s = second.start_s + second.length_s - first.start_s
    one, two = first.length_s / length_s, second.length_s / length_s
    busy = [a * one + b * two for a, b in zip(first.utilization, second.utilization, strict=True)]
    return Sample(
        start_s=first.start_s,
        length_s=length_s,
        pending=first.pending * one + second.pending * two,
        blocking_index=first.blocking_index * one + second.blocking_index * two,
        gpus_held=first.gpus_held * one + second.gpus_held * two,
        utilization=(busy[0], busy[1], busy[2], busy[3]),
    )
