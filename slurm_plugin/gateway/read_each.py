"""Reads records one by one, so that a broken one costs itself only."""

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

from muri.slurm_plugin.records.cluster import Unreadable

BROKEN_RECORD: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a record of an unexpected form may raise."""

Record = TypeVar("Record")


def read_each(
    records: Iterable[Any], read: Callable[[Any], Record], job_id: Callable[[Any], int]
) -> tuple[list[Record], list[Unreadable]]:
    """Read records of jobs.

    Args:
        records: As Slurm gives them.
        read: Makes one of Muri's records.
        job_id: Returns the job's id, whatever else is broken.
    """
    found: list[Record] = []
    unreadable: list[Unreadable] = []
    for record in records:
        try:
            found.append(read(record))
        except BROKEN_RECORD as error:
            unreadable.append(Unreadable(job_id(record), f"its record cannot be read: {error!r}"))
    return found, unreadable
