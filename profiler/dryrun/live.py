"""Measures a model over the first iterations of a job that trains, alone or in company. Pure.

The rules are a dry run's (`steadiness`): when the script has warmed up, and when its means are sure. Only the end
differs. Nothing ends with it, so more iterations cost nothing: the first means are told as soon as there are any, sure
or not, and those that are unsure after `ENOUGH_ITERATIONS` and `ENOUGH_S` with what confidence they have.

An iteration alone takes what it took less the waits for other members: its stages' own times, and the time in no stage.
What others slow down otherwise (caches, memory, cores) is in it, so in company it is an upper bound.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from muri.profiler.dryrun.messages import DryRunResult
from muri.profiler.dryrun.steadiness import (
    HALF_WINDOW,
    LEAST_PERIODS,
    TOLERANCE,
    LoaderAhead,
    most_warmup,
    warmup_by_now,
    whole_periods,
)
from muri.profiler.dryrun.summary import Circumstances, IterationSample, enough_periods, how_sure, summarise
from muri.profiler.records import ProfileDetail

LEAST_ITERATIONS: Final = 2 * HALF_WINDOW
"""With fewer measured ones nothing is sure, and a script that ends has told nothing."""

CHECK_EVERY: Final = 4
"""Measured iterations between the first looks at the means; later ones are further apart."""

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

    Args:
        ahead: How the script's loader works ahead of its loop.
    """

    def __init__(self, ahead: LoaderAhead | None = None) -> None:
        self.is_over = False
        self._ahead = ahead or LoaderAhead()
        self._iterations: list[IterationSample] = []
        self._warmup: int | None = None
        self._stopped = "the script ended"
        self._measured_s = 0.0
        self._least = self._next_look = max(LEAST_ITERATIONS, LEAST_PERIODS * self._ahead.period)

    @property
    def measured(self) -> int:
        """Iterations after the warm-up; 0 while that goes on."""
        return 0 if self._warmup is None else len(self._iterations) - self._warmup

    @property
    def has_means(self) -> bool:
        """Whether its means say something, sure or not."""
        return self.measured >= self._least

    def add(self, own_s: float, stage_s: tuple[float, ...]) -> bool:
        """An iteration ended; returns whether enough is known.

        Args:
            own_s: Its length without waits for other members.
            stage_s: Seconds that each stage owned, without waits.
        """
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
        """The figures of a profile; None where too little was measured.

        Args:
            gpu_mem_gib: Peak GPU memory.
            detail: What else is known.

        Raises:
            ProfileError: A figure cannot be true.
        """
        samples = self._samples()
        if self._warmup is None or len(samples) < LEAST_ITERATIONS:
            return None
        circumstances = Circumstances(
            warmup=self._warmup,
            settled=self._warmup < most_warmup(self._ahead.least_warmup),
            stopped=self._stopped,
            period=self._ahead.period,
            gpu_mem_gib=gpu_mem_gib,
            detail=detail or ProfileDetail(),
        )
        found = summarise(samples, circumstances)
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
