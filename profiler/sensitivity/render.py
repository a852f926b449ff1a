"""A job's sensitivity for a terminal of 80 columns."""

from typing import Final

from rich.console import Console
from rich.text import Text

from muri.profiler.sensitivity.cache_model import Dataset, cache_sizes, throughput
from muri.profiler.sensitivity.record import Sensitivity

_BAR_WIDTH: Final = 40
_MOST_ROWS: Final = 24


def print_sensitivity(console: Console, found: Sensitivity) -> None:
    """Throughput over the CPU count and the cache as bars, and the demand."""
    how = "cores by affinity" if found.pinned else "counts only told to the script"
    console.print(Text(f"{found.name}: {_several(found.cpu.measurements, 'measurement')}, {how}", style="bold"))
    _print_cpus(console, found)
    if found.dataset is not None:
        _print_memory(console, found, found.dataset)
    console.print(Text(demand_line(found), style="bold"))
    if found.cpu.undecided_cpus:
        least = found.demand.cpus - found.cpu.undecided_cpus
        console.print(Text(f"The least count may be as low as {least}: those in between were not measured."))


def demand_line(found: Sensitivity) -> str:
    """The least that saturates, in one line."""
    demand = found.demand
    parts = [_several(demand.cpus, "CPU")]
    if demand.process_gib is not None:
        parts.append(f"{demand.process_gib:.2f} GiB for its processes")
    if demand.cache_gib is not None:
        parts.append(f"{demand.cache_gib:.2f} GiB of cache")
    return f"demand: {', '.join(parts)}"


def shown_counts(found: Sensitivity) -> tuple[int, ...]:
    """The counts worth a line: all of a few, else the measured ones and some in between."""
    top = found.cpu.max_cpus
    if top <= _MOST_ROWS:
        return tuple(range(1, top + 1))
    measured = {point.cpus for point in found.cpu.points}
    return tuple(sorted(measured | {1} | set(range(0, top, -(-top // (_MOST_ROWS // 2)))) - {0}))


def _print_cpus(console: Console, found: Sensitivity) -> None:
    points = {point.cpus: point for point in found.cpu.points}
    best = found.cpu.points[-1].throughput
    console.print(Text(f"{'CPUS':>5} {'ITERATIONS/S':>13}", style="dim"))
    counts = shown_counts(found)
    for cpus in counts:
        value = found.cpu.throughput(cpus)
        point = points.get(cpus)
        line = _bar(f"{cpus:>5} {value:>13.3g} ", value / best, "yellow" if point else "dim yellow")
        if point is not None:
            line.append(f" ± {point.spread * 100:.1f} %")
        if cpus == found.demand.cpus:
            line.append("  enough", style="green")
        console.print(line)
    if not points.keys() >= set(counts):
        console.print(Text("      Without ±: interpolated between measured counts.", style="dim"))


def _print_memory(console: Console, found: Sensitivity, dataset: Dataset) -> None:
    at_full = found.cpu.throughput(found.demand.cpus)
    console.print(
        Text(f"{'CACHE':>5} {'ITERATIONS/S':>13}  computed, on {_several(found.demand.cpus, 'CPU')}", style="dim")
    )
    for gib in cache_sizes(dataset):
        value = throughput(dataset, at_full, gib)
        console.print(_bar(f"{gib:>5.3g} {value:>13.3g} ", value / at_full, "blue").append(f" {gib:.3g} GiB"))
    console.print(
        Text(
            f"      {dataset.dataset_gib:.3g} GiB at {dataset.storage_mib_per_s:.4g} MiB/s, "
            f"{dataset.batch_mib:.3g} MiB per iteration, {dataset.overlap:.0%} overlapped.",
            style="dim",
        )
    )


def _several(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _bar(head: str, share: float, style: str) -> Text:
    filled = min(_BAR_WIDTH, round(_BAR_WIDTH * share))
    return Text(head).append("█" * filled, style=style).append("·" * (_BAR_WIDTH - filled), style="dim")
