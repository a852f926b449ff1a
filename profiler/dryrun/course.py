"""The course of one dry run: takes iterations as they end, says when it is enough, and sums up. Pure."""

from typing import Final

from muri.errors import MuriError
from muri.profiler.dryrun.attribution import Interval
from muri.profiler.dryrun.request import Limits
from muri.profiler.dryrun.result import DryRunResult
from muri.profiler.dryrun.steadiness import HALF_WINDOW, LEAST_WARMUP, MOST_WARMUP, TOLERANCE, settled_after
from muri.profiler.dryrun.summary import Circumstances, IterationSample, how_sure, samples_of, summarise
from muri.profiler.records import ProfileDetail

LEAST_ITERATIONS: Final = 3
"""A script that ends early still counts if so many iterations were measured."""

LEAST_TO_BE_SURE: Final = 2 * HALF_WINDOW

CHECK_EVERY: Final = 4
"""Working out how sure the means are takes a millisecond, which hidden work uses; so it is not done every time."""

NOTABLE: Final = 0.01
"""From this share of the time on the result says that others held the script up."""

_LATE: Final = 2
"""The last iterations are not looked at before the end: work in threads and workers is known when it is done."""


class TooShortError(MuriError):
    """The script ended before enough of it was measured."""


class Course:
    """One dry run.

    Attributes:
        windows: Start and end of each iteration so far, on `time.perf_counter`.
        intervals: All work that was told of.
        stopped: Why it is enough, "" while it is not.
    """

    def __init__(self, limits: Limits) -> None:
        self.windows: list[tuple[float, float]] = []
        self.stopped = ""
        self._limits = limits
        self.intervals: list[Interval] = []
        self._warmup = limits.fixed_warmup
        self._settled = limits.fixed_warmup is not None

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
            self._warmup = LEAST_WARMUP
        least = 1 if self.stopped else min(LEAST_ITERATIONS, self._limits.iterations)
        if self.measured < least:
            raise TooShortError(
                f"the script ended after {len(self.windows)} iterations, {self.measured} of them after the "
                f"warm-up of {self._warmup}; at least {least} are needed"
            )
        held_up = f"; others on its cores held it up for {disturbed:.0%} of the time" if disturbed >= NOTABLE else ""
        circumstances = Circumstances(
            warmup=self._warmup,
            settled=self._settled,
            disturbed=disturbed,
            stopped=(self.stopped or "the script ended") + held_up,
            gpu_mem_gib=gpu_mem_gib,
            detail=detail or ProfileDetail(),
        )
        return summarise(self._known(self._samples(len(self.windows))), circumstances)

    def _look_for_warmup(self) -> None:
        times_s = [end_s - start_s for start_s, end_s in self.windows]
        # Only the one place is new that the latest iteration completes the window of.
        newest = max(LEAST_WARMUP, len(times_s) - 2 * HALF_WINDOW)
        self._warmup = settled_after(times_s, known_unsettled=newest)
        self._settled = self._warmup is not None and self._warmup < MOST_WARMUP
        if self._warmup is None and self._lasts_s(LEAST_WARMUP) > self._limits.steady_s:
            self._warmup = LEAST_WARMUP

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
        since = self.measured - LEAST_TO_BE_SURE
        if since < 0 or since % CHECK_EVERY:
            return ""
        half_width = how_sure(self._samples(len(self.windows) - _LATE)).half_width
        return f"the means are sure within {half_width:.1%}" if half_width <= TOLERANCE else ""

    def _samples(self, until: int) -> list[IterationSample]:
        return samples_of(self.windows[self._warmup or 0 : until], self.intervals)

    def _known(self, samples: list[IterationSample]) -> list[IterationSample]:
        """Leave out the last iterations in which work may have gone on that was not told of before the end."""
        steady = (one for one in self.intervals if not one.own and one.start_s >= self.steady_since_s)
        hidden = [interval.end_s - interval.start_s for interval in steady]
        if not hidden:
            return samples
        known_until_s = self.windows[-1][1] - max(hidden)
        late = sum(end_s > known_until_s for _, end_s in self.windows)
        return samples[:-late] if late and len(samples) - late >= LEAST_ITERATIONS else samples
