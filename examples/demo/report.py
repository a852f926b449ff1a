"""What the demo leaves behind: the table and the timeline of one group's stages."""

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .cluster import JobRecord

COLOURS = {"load": "#4477aa", "preprocess": "#ccbb44", "propagate": "#228833", "synchronize": "#aa3377"}
RESOURCE = {"load": "storage", "preprocess": "CPU", "propagate": "GPU", "synchronize": "network"}
TIMELINE_S = 1.5


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


def draw_timeline(trace: str, names: dict[str, str], path: Path) -> None:
    """Draw the stages of one group over a short stretch in the middle of its life.

    Args:
        trace: The runtime's stage trace, JSON lines.
        names: What to call each member, by job id.
        path: The PNG to write.
    """
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    events = [json.loads(line) for line in trace.splitlines() if line]
    start_s = busiest_moment_s(events)
    members = sorted({event["member"] for event in events}, key=int)
    figure, axes = plt.subplots(figsize=(11, 0.7 * len(members) + 1.6), layout="constrained")
    for event in events:
        if event["end_s"] > start_s and event["start_s"] < start_s + TIMELINE_S:
            span = (event["start_s"] - start_s, event["end_s"] - event["start_s"])
            row = members.index(event["member"])
            axes.broken_barh([span], (row - 0.38, 0.76), facecolors=COLOURS[event["stage"]], linewidth=0)
    axes.set_xlim(0, TIMELINE_S)
    axes.set_yticks(range(len(members)), [f"{names.get(m, '?')} (job {m})" for m in members])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title("Four jobs on one GPU: each holds a resource while the others hold the other three")
    handles = [Patch(color=colour, label=f"{stage} ({RESOURCE[stage]})") for stage, colour in COLOURS.items()]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncol=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def busiest_moment_s(events: list[dict]) -> float:  # type: ignore[type-arg]
    """Return the start of a stretch in which all members were at work: the middle of their common time."""
    firsts: dict[str, float] = {}
    lasts: dict[str, float] = {}
    for event in events:
        firsts[event["member"]] = min(firsts.get(event["member"], event["start_s"]), event["start_s"])
        lasts[event["member"]] = max(lasts.get(event["member"], event["end_s"]), event["end_s"])
    begin_s, end_s = max(firsts.values()), min(lasts.values())
    return max(begin_s, (begin_s + end_s - TIMELINE_S) / 2)
