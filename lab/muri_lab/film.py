"""Records a public simulator's model over time: samples, stays on GPUs, progress."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Generic, TypeVar

from muri.simulator.engine.world import Samples
from muri.simulator.model import GroupSpan, Sample, Simulation

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
