"""The curves of the plots and their colors; curves are thinned so that long traces give small pages."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from muri.profiler.records import RESOURCES
from muri.simulator.model import GroupSpan, SimulationResult

MAX_POINTS: Final = 1500  # Most points of a curve: more than a screen has columns
MAX_SPANS: Final = 3000  # Most bars of a timeline; the largest are drawn
COLORS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7A7A7A")
"""Okabe and Ito's palette for color-blind readers, without yellow and black, which vanish on light or dark."""

GROUP_COLORS: Final = ("#9AA5B1", "#56B4E9", "#009E73", "#D55E00")
"""Colors of groups of one, two, three and four jobs."""

_SECONDS: Final = ((2 * 86_400.0, 86_400.0, "days"), (2 * 3_600.0, 3_600.0, "hours"), (120.0, 60.0, "minutes"))


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
        """How many times sooner the job is done than under the base."""
        return self.base_jct_s / self.jct_s


@dataclass(frozen=True, slots=True)
class Bar:
    """A group's stay on GPUs that lie side by side; a stay may need several."""

    span: GroupSpan  # The stay
    lane: int  # Index of the first GPU over the whole cluster
    height: int  # How many

    @property
    def drawn_height(self) -> float:
        """Height that leaves a thin line between neighbors, whatever their heights."""
        return self.height - 0.08


def thinned(count: int, most: int) -> range | list[int]:
    """Indices of at most `most` out of `count` items, evenly spread, with the first and the last."""
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


def blocking_index(result: SimulationResult) -> Curve:
    """Time waited / remaining time, mean over the waiting jobs, over time, as steps."""
    return _over_time(result, [sample.blocking_index for sample in result.samples])


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
    """Bars of the stays with the most GPU-seconds, by start; and the number of stays left out."""
    order = sorted(result.spans, key=lambda span: (span.start_s, -span.gpu_count, span.node, span.members))
    drawn = set(heapq.nlargest(MAX_SPANS, range(len(order)), key=lambda index: (_gpu_s(order[index]), -index)))
    free_from_s = [0.0] * result.cluster.gpu_count
    bars: list[Bar] = []
    for index, span in enumerate(order):
        lanes = _lanes(free_from_s, span, result.cluster.gpus_per_node)
        for lane in lanes:
            free_from_s[lane] = span.end_s
        if index in drawn:
            bars.extend(Bar(span, run[0], len(run)) for run in _runs(lanes))
    return tuple(bars), len(order) - len(drawn)


def _gpu_s(span: GroupSpan) -> float:
    return (span.end_s - span.start_s) * span.gpu_count


def _lanes(free_from_s: Sequence[float], span: GroupSpan, per_node: int) -> list[int]:
    """GPUs for a stay. A span names neither its GPUs nor the nodes after its first, so any free ones will do."""
    first, count = span.node * per_node, len(free_from_s)
    within = per_node if span.gpu_count <= per_node else count
    lanes = [(first + offset) % count for offset in range(within)]
    side_by_side = _first_run([lane for lane in lanes if free_from_s[lane] <= span.start_s], span.gpu_count)
    if side_by_side:
        return side_by_side
    return sorted(sorted(lanes, key=lambda lane: max(free_from_s[lane], span.start_s))[: span.gpu_count])


def _first_run(lanes: Sequence[int], length: int) -> list[int]:
    """The first run of this many adjacent lanes; empty: there is none."""
    return next((list(run[:length]) for run in _runs(lanes) if len(run) >= length), [])


def _runs(lanes: Sequence[int]) -> list[list[int]]:
    """Lanes split into runs of neighbors."""
    runs: list[list[int]] = []
    for lane in lanes:
        if runs and lane == runs[-1][-1] + 1:
            runs[-1].append(lane)
        else:
            runs.append([lane])
    return runs


def _over_time(result: SimulationResult, values: Sequence[float]) -> Curve:
    """Samples as steps; if there are too many, neighbors are averaged, weighted by time."""
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


def color(index: int) -> str:
    """The color of the index-th policy."""
    return COLORS[index % len(COLORS)]


def time_unit(longest_s: float) -> tuple[float, str]:
    """Length in seconds and name of the unit that suits an axis up to `longest_s`."""
    for at_least_s, size_s, name in _SECONDS:
        if longest_s >= at_least_s:
            return size_s, name
    return 1.0, "seconds"
