"""The course of a measurement: takes iterations as they end, says when it is enough, and sums up.

A dry run ends when its means are sure. A loader that was not seen shows only by its waits: once an iteration stands
out, the dry run goes to its limit, to see whether the wait recurs.

A job that trains does not end with its measurement, so more iterations cost nothing: the first means are reported as
soon as there are any, and unsure ones after `ENOUGH_ITERATIONS` and `ENOUGH_S`. An iteration alone takes its time less
the waits for other members. Other slow-downs (caches, memory, cores) are in it, so in company it is an upper bound.
"""

from __future__ import annotations

import os
import time
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import Final

from muri.errors import MuriError
from muri.profiler.dryrun.attribution import Interval
from muri.profiler.dryrun.messages import DryRunResult, Limits
from muri.profiler.dryrun.steadiness import (
    HALF_WINDOW,
    LEAST_PERIODS,
    LEAST_WARMUP,
    TOLERANCE,
    Circumstances,
    IterationSample,
    LoaderAhead,
    enough_periods,
    how_sure,
    most_warmup,
    samples_of,
    summarize,
    warmup_by_now,
    whole_periods,
)
from muri.profiler.records import ProfileDetail

LEAST_ITERATIONS: Final = 3
"""A script that ends early still counts if so many iterations were measured."""

LEAST_TO_BE_SURE: Final = 2 * HALF_WINDOW

CHECK_EVERY: Final = 4
"""Iterations between two checks of the means: a check takes a millisecond, in which hidden work goes on."""

NOTABLE: Final = 0.01
"""The result says that others held the script up from this share of the time on."""

_LATE: Final = 2
"""The last iterations count only at the end: threads and workers report their work when it is done."""


class TooShortError(MuriError):
    """The script ended before enough of it was measured."""


class Course:
    """One dry run.

    Attributes:
        windows: Start and end of each iteration so far, on `time.perf_counter`.
        intervals: All work that was reported.
        stopped: Why it is enough, "" while it is not.
    """

    def __init__(self, limits: Limits) -> None:
        self.windows: list[tuple[float, float]] = []
        self.stopped = ""
        self._limits = limits
        self.intervals: list[Interval] = []
        self._warmup = limits.fixed_warmup
        self._settled = limits.fixed_warmup is not None
        self._ahead = LoaderAhead()

    @property
    def measured(self) -> int:
        """Iterations after the warm-up; 0 while that goes on."""
        return 0 if self._warmup is None else max(0, len(self.windows) - self._warmup)

    @property
    def steady_since_s(self) -> float:
        """When measuring began, or, during the warm-up, the first iteration."""
        if not self.windows:
            return 0.0
        return self.windows[min(self._warmup or 0, len(self.windows) - 1)][0]

    def hold(self, stage: int, start_s: float, end_s: float, use: float, own: bool) -> None:
        """Work was done; may be called by any thread."""
        self.intervals.append(Interval(stage, start_s, end_s, use, own))

    def works_ahead(self, depth: int, period: int) -> None:
        """A loader of the script may have `depth` batches ready, and its waits recur with `period`."""
        self._ahead = self._ahead.widened(LoaderAhead(depth, period))

    def iteration(self, start_s: float, end_s: float) -> bool:
        """An iteration ended; returns whether it is enough."""
        self.windows.append((start_s, end_s))
        if self._warmup is None:
            self._look_for_warmup()
        if self._warmup is not None and not self.stopped:
            self.stopped = self._why_stop()
        return bool(self.stopped)

    def result(
        self, gpu_mem_gib: float = 0.0, detail: ProfileDetail | None = None, disturbed: float = 0.0
    ) -> DryRunResult:
        """The figures of a profile.

        Args:
            gpu_mem_gib: Peak GPU memory.
            detail: What else was measured.
            disturbed: Share of the time that others held the script up.

        Raises:
            TooShortError: There were too few iterations.
            ProfileError: A figure cannot be true.
        """
        if self._warmup is None:
            self._warmup = self._unsettled_warmup()
        least = 1 if self.stopped else min(LEAST_ITERATIONS, self._limits.iterations)
        if self.measured < least:
            raise TooShortError(
                f"the script ended after {len(self.windows)} iterations, {self.measured} of them after the "
                f"warm-up of {self._warmup}; at least {least} are needed"
            )
        samples = self._in_periods()
        circumstances = Circumstances(
            warmup=self._warmup,
            settled=self._settled,
            disturbed=disturbed,
            stopped=(self.stopped or "the script ended") + self._reservations(samples, disturbed),
            period=self._ahead.period,
            gpu_mem_gib=gpu_mem_gib,
            detail=detail or ProfileDetail(),
        )
        return summarize(samples, circumstances)

    def _reservations(self, samples: list[IterationSample], disturbed: float) -> str:
        """What lowers the confidence, for the user."""
        period, said = self._ahead.period, ""
        if not enough_periods(samples, period):
            said = (
                f"; its loader's waits recur every {period} iterations, and fewer than {LEAST_PERIODS} × {period} count"
                " (measure more: --iterations)"
            )
        if disturbed >= NOTABLE:
            said += f"; others on its cores held it up for {disturbed:.0%} of the time"
        return said

    def _look_for_warmup(self) -> None:
        times_s = [end_s - start_s for start_s, end_s in self.windows]
        self._warmup = warmup_by_now(times_s, self._ahead, self._limits.iterations)
        self._settled = self._warmup is not None and self._warmup < most_warmup(self._ahead.least_warmup)
        if self._warmup is None and self._lasts_s(LEAST_WARMUP) > self._limits.steady_s:
            self._warmup = self._unsettled_warmup()

    def _unsettled_warmup(self) -> int:
        """The warm-up of a script whose time is over: what was ready ahead, as far as a period remains after it."""
        remaining = len(self.windows) - max(self._ahead.period, LEAST_ITERATIONS)
        return max(LEAST_WARMUP, min(self._ahead.depth, remaining))

    def _lasts_s(self, first: int) -> float:
        """How long the iterations since the given one took, and the next one probably will."""
        count = len(self.windows) - first
        if count < 1:
            return 0.0
        lasted_s = self.windows[-1][1] - self.windows[first][0]
        return lasted_s * (1 + 1 / count)

    def _why_stop(self) -> str:
        warmup = self._warmup or 0
        if self.measured >= self._limits.iterations:
            return f"{self.measured} iterations are measured, the most that were asked for"
        if self._limits.fixed_warmup is not None:
            return ""
        if self._lasts_s(warmup) > self._limits.steady_s:
            return f"another iteration would take it over {self._limits.steady_s:g} s of steady work"
        period = self._ahead.period
        since = self.measured - max(LEAST_TO_BE_SURE, LEAST_PERIODS * period)
        if since < 0 or since % CHECK_EVERY:
            return ""
        if period > 1:
            samples = whole_periods(self._known(self._samples(len(self.windows))), period)
        else:
            samples = self._samples(len(self.windows) - _LATE)
        if not enough_periods(samples, period):
            return ""
        sure = how_sure(samples, period=period)
        enough = sure.half_width <= TOLERANCE and not sure.left_out
        return f"the means are sure within {sure.half_width:.1%}" if enough else ""

    def _samples(self, until: int) -> list[IterationSample]:
        return samples_of(self.windows[self._warmup or 0 : until], self.intervals)

    def _in_periods(self) -> list[IterationSample]:
        """The iterations that count: whole periods, without the last iterations if the others suffice."""
        samples, period = self._samples(len(self.windows)), self._ahead.period
        known = self._known(samples)
        if self._limits.fixed_warmup is not None:
            return known
        choices = [whole_periods(known, period), whole_periods(samples, period)]
        enough = (choice for choice in choices if enough_periods(choice, period))
        return next(enough, choices[0] or choices[1] or known)

    def _known(self, samples: list[IterationSample]) -> list[IterationSample]:
        """Leave out the last iterations: work may have gone on in them that was not reported before the end."""
        steady = (one for one in self.intervals if not one.own and one.start_s >= self.steady_since_s)
        hidden = [interval.end_s - interval.start_s for interval in steady]
        if not hidden:
            return samples
        known_until_s = self.windows[-1][1] - max(hidden)
        late = sum(end_s > known_until_s for _, end_s in self.windows)
        return samples[:-late] if late and len(samples) - late >= LEAST_ITERATIONS else samples


LEAST_AT_WORK: Final = 2 * HALF_WINDOW
"""With fewer measured ones nothing is sure, and a script that ends has told nothing."""

_GROWTH: Final = 1.1

ENOUGH_ITERATIONS: Final = 160
"""Four times as many as a dry run measures at most."""

ENOUGH_S: Final = 30.0
"""Iterations of milliseconds are as many as fit into that time, ..."""

MOST_ITERATIONS: Final = 10_000
"""... and no more than these."""


class LiveCourse:
    """The first iterations of one job.

    Attributes:
        is_over: Whether enough is known.
    """

    def __init__(self, ahead: LoaderAhead | None = None) -> None:
        self.is_over = False
        self._ahead = ahead or LoaderAhead()
        self._iterations: list[IterationSample] = []
        self._warmup: int | None = None
        self._stopped = "the script ended"
        self._measured_s = 0.0
        self._least = self._next_look = max(LEAST_AT_WORK, LEAST_PERIODS * self._ahead.period)

    @property
    def measured(self) -> int:
        """Iterations after the warm-up; 0 while that goes on."""
        return 0 if self._warmup is None else len(self._iterations) - self._warmup

    @property
    def has_means(self) -> bool:
        """Whether its means say something, sure or not."""
        return self.measured >= self._least

    def add(self, own_s: float, stage_s: tuple[float, ...]) -> bool:
        """An iteration ended; returns whether enough is known."""
        if self.is_over:
            return True
        self._iterations.append(IterationSample(stage_s, own_s))
        if self._warmup is None:
            times_s = [each.iteration_s for each in self._iterations]
            self._warmup = warmup_by_now(times_s, self._ahead, ENOUGH_ITERATIONS)
            self._measured_s = sum(times_s[self._warmup or 0 :])
        else:
            self._measured_s += own_s
        if self._warmup is not None:
            self._look()
        return self.is_over

    def result(self, gpu_mem_gib: float = 0.0, detail: ProfileDetail | None = None) -> DryRunResult | None:
        """The figures of a profile; None where too little was measured (ProfileError: a figure cannot be true)."""
        samples = self._samples()
        if self._warmup is None or len(samples) < LEAST_AT_WORK:
            return None
        circumstances = Circumstances(
            warmup=self._warmup,
            settled=self._warmup < most_warmup(self._ahead.least_warmup),
            stopped=self._stopped,
            period=self._ahead.period,
            gpu_mem_gib=gpu_mem_gib,
            detail=detail or ProfileDetail(),
        )
        found = summarize(samples, circumstances)
        # What goes on behind other stages is not told, so drift compares the stages' own times.
        return replace(found, detail=replace(found.detail, busy_s=None))

    def _samples(self) -> list[IterationSample]:
        measured = self._iterations[self._warmup or 0 :]
        return whole_periods(measured, self._ahead.period) or measured

    def _look(self) -> None:
        measured, period = self.measured, self._ahead.period
        if measured >= self._next_look:
            self._next_look = max(measured + CHECK_EVERY, round(_GROWTH * measured))
            samples = self._samples()
            sure = how_sure(samples, period=period)
            if enough_periods(samples, period) and sure.half_width <= TOLERANCE and not sure.left_out:
                self._end(f"the means are sure within {sure.half_width:.1%}")
                return
        if (measured >= ENOUGH_ITERATIONS and self._measured_s >= ENOUGH_S) or measured >= MOST_ITERATIONS:
            self._end(f"{measured} iterations are measured")

    def _end(self, why: str) -> None:
        self.is_over, self._stopped = True, why


CROWDED_FROM: Final = 0.9
"""Where Linux does not say how long threads waited, others count from this share of the cores in use on."""

_S_PER_NS: Final = 1e-9
_TASKS: Final = Path("/proc/self/task")
_STAT: Final = Path("/proc/stat")
_IDLE: Final = 3
"""The place of a core's idle time in its line of /proc/stat; its time waiting for storage is the next."""

_GUESTS: Final = 8
"""From here on the line counts time that is also counted before."""


class Disturbance:
    """The share of the time since its creation in which others held this process up.

    Linux counts for each thread how long it was ready to run and had no core. The thread that waited longest stands for
    the script, and of that wait others are to blame by their share of the work on its cores; the rest are its own
    threads and processes that are in each other's way.
    """

    def __init__(self) -> None:
        self._cpus = frozenset(f"cpu{number}" for number in os.sched_getaffinity(0))
        self._since_s = time.monotonic()
        self._own_s = time.process_time()
        self._busy_s = _in_use_s(self._cpus)
        self._waited_s = _waited_s()

    def share(self) -> float:
        """Share of the time that others held it up, 0 to 1."""
        lasted_s = max(1e-9, time.monotonic() - self._since_s)
        busy_s = max(1e-9, _in_use_s(self._cpus) - self._busy_s)
        others = 1 - min(1.0, (time.process_time() - self._own_s) / busy_s)
        waits_s = [waited_s - self._waited_s.get(thread, 0.0) for thread, waited_s in _waited_s().items()]
        if not waits_s:
            return others if busy_s >= CROWDED_FROM * len(self._cpus) * lasted_s else 0.0
        return min(1.0, others * max(waits_s) / lasted_s)


def _in_use_s(cpus: AbstractSet[str]) -> float:
    """Core seconds that any process used of some cores so far."""
    ticks = 0
    for line in _STAT.read_text().splitlines():
        name, *counts = line.split()
        if name in cpus:
            ticks += sum(map(int, counts[:_IDLE] + counts[_IDLE + 2 : _GUESTS]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _waited_s() -> dict[str, float]:
    """How long each thread waited for a core so far; empty where the kernel does not count it."""
    waited: dict[str, float] = {}
    for path in _TASKS.glob("*/schedstat"):
        try:
            waited[path.parent.name] = int(path.read_text().split()[1]) * _S_PER_NS
        except (OSError, IndexError, ValueError):  # it has ended
            continue
    return waited
