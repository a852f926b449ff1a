"""Records that the parts of the twin exchange: programs, their runs, and submissions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from muri.slurm_plugin.records.cluster import Job

Holder = Literal["", "muri", "user", "admin"]  # The holder of a job; "" without a hold


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job."""

    job_id: int  # The job
    number: int  # How often it was requeued before


class Program(Protocol):
    """A job's batch script; it ends its run by `VirtualSlurm.exit`."""

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
    """A job without a program of interest: it waits to be ended."""

    def start(self, run: Run) -> None:
        """Wait."""

    def terminate(self) -> None:
        """Save nothing."""

    def kill(self) -> None:
        """Nothing is left to end."""


class Need(NamedTuple):
    """A job's request on each of its nodes."""

    gpus: int
    cpus: int
    mem_mib: int
    layers: int = 1  # Among how many jobs its CPUs may be shared (OverSubscribe=YES:N); 1: it shares none


class Held(NamedTuple):
    """A running job's share of a node."""

    need: Need
    cores: int  # Its CPUs, a bit for each


@dataclass(slots=True)
class Ledger:
    """slurmctld's private knowledge of a job."""

    asked: Job  # The job as its user asked for it last, changes by users and administrators included
    program: Program  # What runs in it
    holder: Holder = ""  # Who holds it
    environment: Mapping[str, str] = field(default_factory=dict)  # of sbatch
    placed: tuple[tuple[str, Held], ...] = ()  # Its share of each node while it runs
    goes_back: Literal["", "queue", "held"] = ""  # at the end of its run, held or not
    ends_as: str = ""  # State at the end of its run where that is decided
    run: Run | None = None  # The run under way
    by: str = ""  # On whose word it was last requeued or cancelled
    array: int = 0  # The job array that it belongs to, 0 for none
    tasks: list[Program] = field(default_factory=list)  # programs of the waiting tasks of an array's record
    most_tasks: int = 0  # How many tasks of the array may run at once, 0 for any number
    released_s: float = 0.0  # last release


Note = Callable[[str, Job], None]
"""Called with an event of a job: "submitted", "split", "started", "ended", "requeued", "forgotten".

"split" means that a job array's task leaves the record which stands for those that wait.
"""
