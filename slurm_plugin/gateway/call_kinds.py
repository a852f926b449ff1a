"""Kinds of calls to Slurm, by which they are counted: what slurmctld has to do for each differs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

Calls = Counter[str]
"""How often Slurm was asked, by kind."""

JOBS: Final = "jobs"
"""All jobs."""

JOB: Final = "job"
"""One job."""

NODES: Final = "nodes"
RESERVATIONS: Final = "reservations"
LEASE: Final = "lease"
"""A change of the reservation that withholds the gate's licence."""

CHANGE: Final = "change"
"""A change of one job."""

SUBMISSION: Final = "submission"

_SHOWN: Final[Mapping[str, str]] = {
    "nodes": NODES, "node": NODES, "reservation": RESERVATIONS, "partition": "partitions", "config": "configuration",
    "license": "licences",
}  # fmt: skip

_OF_COMMAND: Final[Mapping[str, str]] = {
    "sbatch": SUBMISSION, "scancel": "cancellation", "sacctmgr": "accounts", "sacct": "accounts", "sinfo": NODES,
}  # fmt: skip


def kind_of(arguments: Sequence[str]) -> str:
    """Return what kind of call a command is, "" where it asks nobody.

    Args:
        arguments: The command's name and its arguments.
    """
    command, words = arguments[0], [word for word in arguments[1:] if not word.startswith("-")]
    if command == "squeue":
        return _of_squeue(arguments)
    if command == "scontrol" and len(words) > 1:
        return _of_scontrol(*words)
    return _OF_COMMAND.get(command, "other")


def _of_squeue(arguments: Sequence[str]) -> str:
    if "--helpFormat" in arguments:
        return ""
    chosen = [word for word in arguments if word.startswith("--jobs=")]
    return JOB if chosen and "," not in chosen[0] else JOBS  # squeue fetches all jobs to show several


def _of_scontrol(verb: str, what: str, *others: str) -> str:
    if verb == "show" and what == "job":
        return JOB if others else JOBS
    if verb == "show":
        return _SHOWN.get(what, "other")
    return LEASE if "reservation" in what else CHANGE
