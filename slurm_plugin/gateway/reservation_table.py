"""Reads reservations as Slurm prints them, one a line; the commands and libslurm print them alike in all releases."""

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Final

from muri.slurm_plugin.gateway import text_fields
from muri.slurm_plugin.records.cluster import Node, Reservation

log = logging.getLogger(__name__)

_FIELD: Final = re.compile(r"(?:^|\s)([A-Za-z]+)=(\S*)")


_KEEP_S: Final = 300.0

_SET_ASIDE: Final = frozenset({"RESERVED", "MAINT", "MAINTENANCE"})
"""States of a node that an active reservation sets aside."""


class ReservationsReader:
    """Reads reservations and keeps them for some minutes, or until the nodes show that one has begun or ended.

    One that was made meanwhile for later is seen some minutes later; Slurm obeys it anyway.

    Args:
        table: Asks Slurm.
        now: The clock, in seconds.
    """

    def __init__(self, table: Callable[[], str], now: Callable[[], float] = time.monotonic) -> None:
        self._table = table
        self._now = now
        self._kept: tuple[Reservation, ...] = ()
        self._set_aside: frozenset[str] = frozenset()
        self._read_again_s = float("-inf")

    def read(self, nodes: Iterable[Node]) -> tuple[Reservation, ...]:
        """Return the reservations.

        Args:
            nodes: As they are now.
        """
        set_aside = frozenset(node.name for node in nodes if _SET_ASIDE.intersection(node.state.split("+")))
        if self._now() >= self._read_again_s or set_aside != self._set_aside:
            self._kept = reservations_of_table(self._table())
            self._set_aside = set_aside
            self._read_again_s = self._now() + _KEEP_S
        return self._kept

    def forget(self) -> None:
        """Read anew the next time: Muri itself has made or ended one."""
        self._read_again_s = float("-inf")


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
