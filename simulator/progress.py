"""A bar with the time that is left, for a person at a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from muri.simulator.sweep import Watch


@contextmanager
def progress_bar(names: list[str], *, shown: bool) -> Iterator[Watch]:
    """Give what `sweep` tells its progress; draws a bar on stderr.

    Args:
        names: One for each run, shown while it is the last that moved.
        shown: Whether to draw at all; never where stderr is no terminal.
    """
    if not shown or not sys.stderr.isatty():
        yield lambda index, share: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    shares = [0.0] * len(names)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(names[0], total=float(len(names)))

        def watch(index: int, share: float) -> None:
            shares[index] = max(shares[index], min(1.0, share))
            done = sum(one == 1.0 for one in shares)
            description = f"{names[index]} ({done} of {len(names)} done)" if len(names) > 1 else names[index]
            progress.update(task, completed=sum(shares), description=description)

        yield watch
