"""The curves of the plots, thinned so that a page stays small whatever the trace's length."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from muri.profiler.records import RESOURCES
from muri.simulator.model import GroupSpan, SimulationResult

MAX_POINTS: Final = 1500
"""Points of a curve; more than a screen has columns."""

MAX_SPANS: Final = 3000
"""Bars of a timeline; the largest are drawn."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of a line, x ascending."""

    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class JobPoint:
    """One job's completion time under two policies."""

    job_id: int
    gpu_count: int
    base_jct_s: float
    jct_s: float

    @property
    def speedup(self) -> float:
        """How many times sooner it is done than under the base."""
        return self.base_jct_s / self.jct_s


@dataclass(frozen=True, slots=True)
class Bar:
    """A group's stay on its GPUs.

    Attributes:
        lane: Index of its first GPU over the whole cluster.
        height: GPUs held.
    """

    span: GroupSpan
    lane: int
    height: int


def thinned(count: int, most: int) -> range | list[int]:
    """Indices of at most `most` out of `count` things, evenly spread, the first and last among them."""
    if count <= most:
        return range(count)
    return [round(position * (count - 1) / (most - 1)) for position in range(most)]


def jct_cdf(result: SimulationResult) -> Curve:
    """Share of the jobs (y) that are done within x seconds of their submission."""
    times = sorted(record.jct_s for record in result.records)
    chosen = thinned(len(times), MAX_POINTS)
    return Curve(tuple(times[index] for index in chosen), tuple((index + 1) / len(times) for index in chosen))


def queue_length(result: SimulationResult) -> Curve:
    """Waiting jobs over time, as steps."""
    return _over_time(result, [float(sample.pending) for sample in result.samples])


def utilization(result: SimulationResult) -> dict[str, Curve]:
    """Busy share of each resource over time, as steps."""
    return {
        name: _over_time(result, [sample.utilization[index] for sample in result.samples])
        for index, name in enumerate(RESOURCES)
    }


def job_speedups(base: SimulationResult, other: SimulationResult) -> tuple[JobPoint, ...]:
    """Jobs by completion time under the base, at most `MAX_POINTS` of them, evenly spread."""
    of_job = {record.job.job_id: record for record in other.records}
    pairs = [(one, of_job[one.job.job_id]) for one in base.records if one.job.job_id in of_job]
    points = sorted(
        (
            JobPoint(one.job.job_id, one.job.gpu_count, one.jct_s, two.jct_s)
            for one, two in pairs
            if one.jct_s > 0 and two.jct_s > 0
        ),
        key=lambda point: (point.base_jct_s, point.job_id),
    )
    return tuple(points[index] for index in thinned(len(points), MAX_POINTS))


def timeline(result: SimulationResult) -> tuple[tuple[Bar, ...], int]:
    """Bars of the groups that held most GPU-seconds, by start; and how many groups there were in all."""
    lanes = _lanes(result)
    largest = heapq.nlargest(MAX_SPANS, lanes, key=lambda bar: (_gpu_s(bar.span), -bar.lane))
    bars = sorted(largest, key=lambda bar: (bar.span.start_s, bar.lane))
    return tuple(bars), len(lanes)


def _gpu_s(span: GroupSpan) -> float:
    return (span.end_s - span.start_s) * span.gpu_count


def _lanes(result: SimulationResult) -> list[Bar]:
    """Stack the groups of each node. Which GPU of its node a group holds is not told, and makes no difference."""
    per_node = result.cluster.gpus_per_node
    free_from_s = [0.0] * result.cluster.gpu_count
    bars = []
    for span in sorted(result.spans, key=lambda span: (span.start_s, -span.gpu_count, span.node, span.members)):
        first = span.node * per_node
        end = max(first + per_node, first + span.gpu_count)
        lane = _place(free_from_s, range(first, max(first + 1, end - span.gpu_count + 1)), span)
        free_from_s[lane : lane + span.gpu_count] = [span.end_s] * len(free_from_s[lane : lane + span.gpu_count])
        bars.append(Bar(span, lane, span.gpu_count))
    return bars


def _place(free_from_s: Sequence[float], lanes: range, span: GroupSpan) -> int:
    """The first lane that is free for the whole group; where a node is split up, the one that is free first."""
    waits = {lane: max(free_from_s[lane : lane + span.gpu_count], default=0.0) for lane in lanes}
    free = [lane for lane, until_s in waits.items() if until_s <= span.start_s]
    return free[0] if free else min(waits, key=lambda lane: waits[lane])


def _over_time(result: SimulationResult, values: Sequence[float]) -> Curve:
    """Samples as steps; neighbours are averaged, weighted by time, where there are too many."""
    samples = result.samples
    bins = max(1, -(-len(samples) // MAX_POINTS))
    x, y = [], []
    for start in range(0, len(samples), bins):
        part, levels = samples[start : start + bins], values[start : start + bins]
        length_s = sum(sample.length_s for sample in part)
        weighted = sum(level * sample.length_s for level, sample in zip(levels, part, strict=True))
        x.append(part[0].start_s)
        y.append(weighted / length_s if length_s > 0 else levels[0])
    if samples:
        x.append(samples[-1].start_s + samples[-1].length_s)
        y.append(y[-1])
    return Curve(tuple(x), tuple(y))
