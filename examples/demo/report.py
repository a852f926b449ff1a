"""What the demo leaves behind: the table of job completion times."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from .cluster import JobRecord


@dataclass(frozen=True)
class Comparison:
    """The same jobs, in the same order, with Muri and without."""

    with_muri: tuple[JobRecord, ...]
    without: tuple[JobRecord, ...]

    @property
    def average_speedup(self) -> float:
        """Average JCT without Muri over average JCT with it."""
        return average_jct_s(self.without) / average_jct_s(self.with_muri)

    @property
    def all_completed(self) -> bool:
        """Whether Slurm says COMPLETED of every job."""
        return all(job.state == "COMPLETED" for job in self.with_muri + self.without)


def average_jct_s(jobs: tuple[JobRecord, ...]) -> float:
    """Average job completion time."""
    return sum(job.jct_s for job in jobs) / len(jobs)


def makespan_s(jobs: tuple[JobRecord, ...]) -> float:
    """From the first submission to the last end."""
    return max(job.end_s for job in jobs) - min(job.submit_s for job in jobs)


def print_table(comparison: Comparison, console: Console) -> None:
    """Print JCT per job, averages and makespan."""
    table = Table(title="Job completion time (JCT), seconds from submission to end", title_justify="left")
    table.add_column("job")
    for name in ("without Muri", "with Muri", "speed-up"):
        table.add_column(name, justify="right")
    table.add_column("final state")
    for old, new in zip(comparison.without, comparison.with_muri, strict=True):
        state = new.state if new.state == old.state else f"{old.state} / {new.state}"
        table.add_row(new.name, f"{old.jct_s:.0f}", f"{new.jct_s:.0f}", f"{old.jct_s / new.jct_s:.2f} ×", state)
    table.add_section()
    for name, figure in (("average JCT", average_jct_s), ("makespan", makespan_s)):
        old_s, new_s = figure(comparison.without), figure(comparison.with_muri)
        table.add_row(name, f"{old_s:.1f}", f"{new_s:.1f}", f"{old_s / new_s:.2f} ×", "")
    console.print(table)
