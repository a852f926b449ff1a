"""Reads reservations as Slurm prints them, one a line; the commands and libslurm print them alike in all releases."""

import logging
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Final

from muri.slurm_plugin.gateway import text_fields
from muri.slurm_plugin.records.cluster import Reservation

log = logging.getLogger(__name__)

_FIELD: Final = re.compile(r"(?:^|\s)([A-Za-z]+)=(\S*)")


def reservations_of_table(table: str) -> tuple[Reservation, ...]:
    """Parse `scontrol show reservation --oneliner`; a line that cannot be read is left out."""
    lines = (line for line in table.split("\n") if line.startswith("ReservationName="))
    return tuple(sorted(_readable(lines), key=lambda each: each.name))


def _readable(lines: Iterator[str]) -> Iterator[Reservation]:
    for line in lines:
        try:
            yield _reservation(line)
        except (LookupError, ValueError, OverflowError) as error:
            log.warning("a reservation is left out, for it cannot be read: %r; in %.200r", error, line)


def _reservation(line: str) -> Reservation:
    fields: dict[str, str] = {}
    for name, value in _FIELD.findall(line):
        fields.setdefault(name, "" if value == "(null)" else value)
    return Reservation(
        name=fields["ReservationName"],
        nodes=fields.get("Nodes", ""),
        start_s=_time_s(fields["StartTime"]),
        end_s=_time_s(fields["EndTime"]),
        flags=tuple(sorted(flag.partition("=")[0].upper() for flag in fields.get("Flags", "").split(",") if flag)),
        licenses=text_fields.license_text(fields.get("Licenses", "")),
    )


def _time_s(text: str) -> float:
    """Read a time, which Slurm prints as seconds where SLURM_TIME_FORMAT says so."""
    return float(text_fields.bounded(int(text) if text.isdigit() else int(datetime.fromisoformat(text).timestamp())))
