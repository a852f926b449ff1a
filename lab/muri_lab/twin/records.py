"""What the parts of the twin tell each other: programs, their runs, and what a user submits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from muri.slurm_plugin.records.cluster import Job

Holder = Literal["", "muri", "user", "admin"]
"""Who holds a job; "" where nobody does."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job.

    Attributes:
        job_id: The job.
        number: How often it was requeued before.
    """

    job_id: int
    number: int


class Program(Protocol):
    """What a job's batch script does; it ends its run by `VirtualSlurm.exit`."""

    def start(self, run: Run) -> None:
        """Begin."""
        ...

    def terminate(self) -> None:
        """Take note of a SIGTERM."""
        ...

    def kill(self) -> None:
        """Be gone at once: the processes have ended, by SIGKILL or with their node."""
        ...


class NoProgram:
    """What runs in a job whose program is of no interest: it waits to be ended."""

    def start(self, run: Run) -> None:
        """Wait."""

    def terminate(self) -> None:
        """Save nothing."""

    def kill(self) -> None:
        """Nothing is left to end."""


@dataclass(slots=True)
class Ledger:
    """What slurmctld knows of a job beside what it shows.

    Attributes:
        asked: The job as its user asked for it last, changes by users and administrators included.
        program: What runs in it.
        holder: Who holds it.
        environment: What it was submitted with.
        placed: GPUs, CPUs and MiB that it has of each node while it runs.
        goes_back: Whether it goes back to the queue at the end of its run, and is held then.
        ends_as: State at the end of its run where that is decided.
        run: The run under way.
        by: On whose word it was last requeued or cancelled.
        array: The job array that it belongs to, 0 for none.
        tasks: What runs in the array's tasks that this record stands for, in order; none where it is a task itself.
        most_tasks: How many tasks of the array may run at once, 0 for any number.
        released_s: When somebody last released it.
    """

    asked: Job
    program: Program
    holder: Holder = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    placed: tuple[tuple[str, int, int, int], ...] = ()
    goes_back: Literal["", "queue", "held"] = ""
    ends_as: str = ""
    run: Run | None = None
    by: str = ""
    array: int = 0
    tasks: list[Program] = field(default_factory=list)
    most_tasks: int = 0
    released_s: float = 0.0


Note = Callable[[str, Job], None]
"""Is told of what happens to a job: "submitted", "split", "started", "ended", "requeued", "forgotten".

"split" is told of a job array's task that leaves the record which stands for those that wait.
"""
