"""What the demo leaves behind: the table of job completion times, the same figures as JSON, and a picture."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from . import timeline
from .cluster import DemoError, JobRecord

Jobs = tuple[JobRecord, ...]
SPAN_S = timeline.DEFAULT_SPAN_S


def average_jct_s(jobs: Jobs) -> float:
    """Average job completion time."""
    return sum(job.jct_s for job in jobs) / len(jobs)


def makespan_s(jobs: Jobs) -> float:
    """From the first submission to the last end."""
    return max(job.end_s for job in jobs) - min(job.submit_s for job in jobs)


FIGURES: dict[str, Callable[[Jobs], float]] = {"average JCT": average_jct_s, "makespan": makespan_s}


def print_table(rounds: Mapping[str, Jobs], console: Console) -> None:
    """Print JCT per job, averages and makespan of each round, and how many times shorter than plain Slurm's."""
    table = Table(title="Job completion time (JCT), seconds from submission to end", title_justify="left")
    table.add_column("job", no_wrap=True)
    for name in (
        "1. plain\nSlurm",
        "2. Muri\nas shipped",
        "3. Muri,\nmuri-jct",
        "2. times\nshorter",
        "3. times\nshorter",
    ):
        table.add_column(name, justify="right")
    for row in zip(*rounds.values(), strict=True):
        times_s = [job.jct_s for job in row]
        table.add_row(row[0].name, *(f"{each:.0f}" for each in times_s), *_times_shorter(times_s))
    table.add_section()
    for name, figure in FIGURES.items():
        times_s = [figure(jobs) for jobs in rounds.values()]
        table.add_row(name, *(f"{each:.1f}" for each in times_s), *_times_shorter(times_s))
    console.print(table)


def _times_shorter(times_s: list[float]) -> list[str]:
    plain_s, *with_muri_s = times_s
    return [f"{plain_s / each:.2f} ×" for each in with_muri_s]


def save(rounds: Mapping[str, Jobs], path: Path) -> None:
    """Write each round's jobs and figures as JSON."""
    figures = {what: {name: figure(jobs) for name, jobs in rounds.items()} for what, figure in FIGURES.items()}
    jobs = {name: [asdict(job) for job in jobs] for name, jobs in rounds.items()}
    path.write_text(json.dumps({"figures": figures, "rounds": jobs}, indent=1) + "\n")


def draw_timeline(folder: Path, jobs: Jobs, output: Path) -> str:
    """Draw the group that had most members at once, at its busiest, and return the picture's title.

    Args:
        folder: Has the traces of a round's groups.
        jobs: The round's jobs.
        output: The picture.

    Raises:
        DemoError: No group's trace has a stage.
    """
    found = []
    for path in sorted(folder.glob("*.trace.json")):
        try:
            slices = timeline.read_slices(path)
        except timeline.TraceFileError:  # a group whose job was gone before its first stage
            continue
        begin_s = timeline.busiest_moment_s(slices, SPAN_S)
        found.append((len(timeline.members_of(timeline.within(slices, begin_s, SPAN_S))), begin_s, slices))
    if not found:
        raise DemoError(f"no group in {folder} has left a trace with stages")
    count, begin_s, slices = max(found, key=lambda each: each[0])
    title = f"{count} job{'s' * (count > 1)} on one GPU: what each does, and who uses each resource"
    names = {str(job.job_id): job.name for job in jobs}
    timeline.draw(slices, begin_s, SPAN_S, output, timeline.Captions(title, names))
    return title
