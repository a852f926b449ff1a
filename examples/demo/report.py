"""What the demo leaves behind: the table of job completion times, and the same figures as JSON."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .cluster import JobRecord

Jobs = tuple[JobRecord, ...]


@dataclass(frozen=True)
class Comparison:
    """The same jobs, in the same order, in each round.

    Attributes:
        fifo: Plain Slurm, in the order of submission.
        ordered: Muri's order, one job after the other.
        shared: Muri's order, and jobs share the GPU.
    """

    fifo: Jobs
    ordered: Jobs
    shared: Jobs

    @property
    def rounds(self) -> tuple[Jobs, Jobs, Jobs]:
        """The jobs of each round."""
        return self.fifo, self.ordered, self.shared

    @property
    def all_completed(self) -> bool:
        """Whether Slurm says COMPLETED of every job."""
        return all(job.state == "COMPLETED" for jobs in self.rounds for job in jobs)

    def gain(self, figure: Callable[[Jobs], float]) -> "Gain":
        """Split what became better of a figure."""
        fifo, ordered, shared = map(figure, self.rounds)
        return Gain(fifo / ordered, ordered / shared)


@dataclass(frozen=True)
class Gain:
    """How many times shorter a time became, by each of two causes."""

    order: float
    sharing: float

    @property
    def total(self) -> float:
        """How many times shorter it became in all."""
        return self.order * self.sharing


def average_jct_s(jobs: Jobs) -> float:
    """Average job completion time."""
    return sum(job.jct_s for job in jobs) / len(jobs)


def makespan_s(jobs: Jobs) -> float:
    """From the first submission to the last end."""
    return max(job.end_s for job in jobs) - min(job.submit_s for job in jobs)


FIGURES: dict[str, Callable[[Jobs], float]] = {"average JCT": average_jct_s, "makespan": makespan_s}


def print_table(comparison: Comparison, console: Console) -> None:
    """Print JCT per job, averages and makespan, and what of the gain is due to order and to sharing."""
    table = Table(title="Job completion time (JCT), seconds from submission to end", title_justify="left")
    table.add_column("job", no_wrap=True)
    for name in ("1. Slurm,\nFIFO", "2. Muri,\norder", "3. Muri,\nsharing"):
        table.add_column(name, justify="right")
    for name in ("due to\norder", "due to\nsharing", "\ntotal"):
        table.add_column(name, justify="right")
    for row in zip(*comparison.rounds, strict=True):
        times_s = [job.jct_s for job in row]
        table.add_row(row[0].name, *(f"{each:.0f}" for each in times_s), *_factors(*times_s))
    table.add_section()
    for name, figure in FIGURES.items():
        times_s = [figure(jobs) for jobs in comparison.rounds]
        table.add_row(name, *(f"{each:.1f}" for each in times_s), *_factors(*times_s))
    console.print(table)


def _factors(fifo_s: float, ordered_s: float, shared_s: float) -> tuple[str, str, str]:
    gain = Gain(fifo_s / ordered_s, ordered_s / shared_s)
    return f"{gain.order:.2f} ×", f"{gain.sharing:.2f} ×", f"{gain.total:.2f} ×"


def save(comparison: Comparison, path: Path) -> None:
    """Write all jobs and the gains as JSON."""
    names = ("fifo", "ordered", "shared")
    rounds = {name: [asdict(job) for job in jobs] for name, jobs in zip(names, comparison.rounds, strict=True)}
    gains = {
        name: {**asdict(gain), "total": gain.total}
        for name, gain in ((name, comparison.gain(figure)) for name, figure in FIGURES.items())
    }
    path.write_text(json.dumps({"rounds": rounds, "gains": gains}, indent=1) + "\n")
