"""Slurm's tables of nodes and reservations, islands of GPUs, and the reservation that withholds Muri's license.

The commands and libslurm print the tables alike, in all releases.
"""

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Final, TypeVar

from muri.slurm_plugin.gateway import text_fields
from muri.slurm_plugin.gateway.base import Gateway, GatewayError, NoGateLicenseError, SlurmUnreachableError
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.records.cluster import Node, Reservation
from muri.slurm_plugin.records.nodes import Islands, islands_of, name_count, names_in
from muri.slurm_plugin.records.roles import GATE_LICENSE

log = logging.getLogger(__name__)

Record = TypeVar("Record")

#: Node states and flags under which no new job starts there, whatever it asks for. Reservations are not among them:
#: their own jobs start on nodes that are RESERVED or in MAINT.
_CLOSED_NODE_WORDS: Final = frozenset(
    {
        "BLOCKED", "CLOUD_DOWN", "DOWN", "DRAIN", "DRAINED", "DRAINING", "ERROR", "FAIL", "FAILING", "FUTURE",
        "INVAL", "INVALID", "INVALID_REG", "NOT_RESPONDING", "NO_RESPOND", "POWERING_DOWN", "POWER_DOWN",
        "POWER_DRAIN", "REBOOT", "REBOOT_ISSUED", "REBOOT_REQUESTED", "UNKNOWN",
    }
)  # fmt: skip
_OPEN_NODE_STATES: Final = frozenset({"IDLE", "MIXED", "ALLOCATED", "COMPLETING", "PLANNED"})
#: The one-letter suffixes of a node state, see the section "NODE STATE CODES" of sinfo's manual.
_NODE_SUFFIXES: Final = {
    "*": "NOT_RESPONDING", "$": "MAINTENANCE", "@": "REBOOT", "^": "REBOOT", "%": "POWERING_DOWN",
    "!": "POWERING_DOWN", "~": "POWERED_DOWN", "#": "POWERING_UP", "-": "PLANNED",
}  # fmt: skip

_NODE_NAMES: Final = (
    "NodeName", "State", "CPUAlloc", "CPUEfctv", "CPUTot", "Gres", "GresUsed", "Partitions", "RealMemory",
    "MemSpecLimit", "AllocMem", "ThreadsPerCore", "AvailableFeatures",
)  # fmt: skip
_NODE_FIELD: Final = re.compile(rf"(?:^|\s)({'|'.join(_NODE_NAMES)})=(\S*)")


def nodes_of_table(table: str, partitions: Mapping[str, tuple[str, ...]] | None = None) -> tuple[Node, ...]:
    """Parse the node table, one line per node; an unreadable line is left out.

    Args:
        table: The text.
        partitions: Names of each node's partitions, for a text without them.
    """
    nodes = _readable("node", table, "NodeName=", lambda line: _node(line, partitions or {}))
    return tuple(sorted(nodes, key=lambda node: node.name))


def _readable(kind: str, table: str, begin: str, read: Callable[[str], Record]) -> Iterator[Record]:
    """Yield the record of each line that begins with a word; an unreadable one is left out."""
    for line in table.split("\n"):
        if line.startswith(begin):
            try:
                yield read(line)
            except (LookupError, ValueError, OverflowError) as error:
                log.warning("a %s is left out, for its record cannot be read: %r; in %.200r", kind, error, line)


def node_words(text: str) -> list[str]:
    """Split a node's state such as "IDLE+DRAIN*" into words, suffix signs spelled out."""
    words = []
    for part in text.upper().split("+"):
        bare = part.rstrip("".join(_NODE_SUFFIXES))
        words += [bare, *(_NODE_SUFFIXES[sign] for sign in part[len(bare) :])]
    return [word for word in words if word]


def node_usable(words: Iterable[str]) -> bool:
    """Whether new jobs can start on a node in this state."""
    names = [word.upper() for word in words]
    return bool(_OPEN_NODE_STATES.intersection(names)) and not _CLOSED_NODE_WORDS.intersection(names)


def _node(line: str, partitions: Mapping[str, tuple[str, ...]]) -> Node:
    # Free text such as Reason= comes last and can't replace a field.
    fields: dict[str, str] = dict(reversed(_NODE_FIELD.findall(line)))
    cpus_allocated = int(fields["CPUAlloc"])
    state = node_words(fields["State"])
    cpu_count = int(fields.get("CPUEfctv", fields["CPUTot"]))
    if 0 < cpus_allocated < cpu_count:
        # Slurm leaves it to its clients to say so of a node with some CPUs free.
        state = ["MIXED" if word == "ALLOCATED" else word for word in state]
    configured = text_fields.gres_counts(fields.get("Gres", ""))
    name, mem_mib = fields["NodeName"], int(fields.get("RealMemory", 0))  # Slurm has 1 MiB where none is configured
    return Node(
        name=name,
        usable=node_usable(state),
        state="+".join(state),
        partitions=partitions.get(name) or tuple(sorted(_listed(fields.get("Partitions", "")))),
        cpu_count=cpu_count,
        cpus_allocated=cpus_allocated,
        gpu_count=text_fields.gpu_total(configured),
        gpus_allocated=gpus_taken(fields.get("GresUsed", "")),
        gpu_type=text_fields.gpu_type(configured),
        mem_mib=max(mem_mib - int(fields.get("MemSpecLimit", 0)), 0) if mem_mib > 1 else 0,
        mem_allocated_mib=int(fields.get("AllocMem", 0)),
        threads_per_core=max(1, int(fields.get("ThreadsPerCore", 1))),
        features=tuple(_listed(fields.get("AvailableFeatures", ""))),
        gpus_in_use=indices_in(fields.get("GresUsed", "")),
    )


def _listed(text: str) -> list[str]:
    return [part for part in text.replace("(null)", "").split(",") if part]


_SHARE: Final = re.compile(r" Nodes=(\S+) CPU_IDs=\S* Mem=\d+ GRES=(\S*)")
"""A job's share of some of its nodes.

A user's own texts could hold the same words, so the number of GPUs is compared with the nodes' table.
"""

_AT_WORK: Final = (" JobState=RUNNING ", " JobState=SUSPENDED ", " JobState=COMPLETING ")

_MOST_DEVICES: Final = 64

_SPAN: Final = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
"""Short numbers alone: a user may have written the text, with millions of GPUs or a number that Python cannot read."""

Held = tuple[str, tuple[int, ...]]
"""A folded host list, and Slurm's indices of the GPUs that a job has on each of these nodes."""


def gpus_taken(gres_used: str) -> int:
    """Count the GPUs that no job can get whole, of a node's GresUsed such as "gpu:1(IDX:1),shard:2(2/4,-/4)"."""
    whole = text_fields.gpu_total(text_fields.gres_counts(gres_used))
    shares = re.findall(r"(?:^|,)(?:shard|mps)\b[^,()]*\(([0-9/,-]+)\)", gres_used)
    return whole + sum(share[0] in "123456789" for listed in shares for share in listed.split(",") if share)


def indices_in(gres_used: str) -> tuple[int, ...]:
    """Return the indices of the GPUs in use, of a node's GresUsed such as "gpu:a100:2(IDX:0,3),muri:1".

    Slurm shows them for GPUs with files; "N/A" stands for none.
    """
    found: set[int] = set()
    for listed in re.findall(r"(?:^|,)gpu(?::[^,():]+)*(?::\d+)?\(IDX:([0-9,-]+)\)", gres_used):
        for part in listed.split(","):
            if span := _SPAN.fullmatch(part):
                first, last = int(span[1]), int(span[2] or span[1])
                found.update(range(first, min(last, first + _MOST_DEVICES) + 1))
    return tuple(sorted(found))


def held_in(text: str) -> Iterator[Held]:
    """Read the output of `scontrol --details --oneliner show job`."""
    for line in text.split("\n"):
        if any(state in line for state in _AT_WORK):
            found = ((nodes, indices_in(gres)) for nodes, gres in _SHARE.findall(line))
            yield from ((nodes, indices) for nodes, indices in found if indices)


_INCLUDE: Final = re.compile(r"(?im)^\s*include\s+(\S+)")
_LARGEST: Final = 4 << 20


def default_path() -> Path:
    """Return where gres.conf is: beside slurm.conf."""
    return Path(os.environ.get("SLURM_CONF") or "/etc/slurm/slurm.conf").with_name("gres.conf")


class GresConf:
    """The islands in gres.conf, read anew when the file has changed, where this host has the file of slurmctld.

    Args:
        path: The file, None for no file at all.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen: tuple[tuple[str, int, int], ...] = ()
        self._islands: dict[str, Islands] = {}

    def with_islands(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return nodes with their islands, where the file tells them for as many GPUs as Slurm has."""
        by_node = self._current()
        if not by_node:
            return nodes
        pairs = [(node, by_node.get(node.name) or by_node.get("", ())) for node in nodes]
        return tuple(
            replace(node, gpu_islands=islands) if islands and sum(map(len, islands)) == node.gpu_count else node
            for node, islands in pairs
        )

    def with_places(self, gateway: Gateway, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return nodes with their islands and the GPUs in use; these are asked for only where they count.

        Raises:
            SlurmUnreachableError: slurmctld does not answer.
        """
        nodes = self.with_islands(nodes)
        if not any(map(_lacks_indices, nodes)):
            return nodes
        try:
            in_use = gpus_by_node(gateway.gpus_in_use(), sum(node.gpu_count for node in nodes))
        except SlurmUnreachableError:
            raise
        except GatewayError as error:
            log.warning("jobs are placed without knowing which GPUs are free: %s", error)
            return nodes
        return tuple(
            replace(node, gpus_in_use=in_use.get(node.name, ())) if _lacks_indices(node) else node for node in nodes
        )

    def _current(self) -> dict[str, Islands]:
        if self._path is None:
            return {}
        try:
            # The file and those that it includes, one level deep as Slurm's documentation shows it.
            names = (Path(self._path.parent, name) for name in _INCLUDE.findall(_text(self._path)))
            files = [self._path, *(file for name in names for file in sorted(name.parent.glob(name.name)))]
            seen = tuple((str(path), (stat := path.stat()).st_mtime_ns, stat.st_size) for path in files)
            if seen != self._seen:
                self._islands = islands_of([_text(path) for path in files])
                self._seen = seen
        except OSError as error:
            # Without it jobs are placed by the number of free GPUs, as on sites without the file.
            if self._seen or not isinstance(error, FileNotFoundError):
                log.warning("which GPUs are near each other is not known: %s", error)
            self._seen, self._islands = (), {}
        return self._islands


def gpus_by_node(held: Iterable[Held], most: int) -> dict[str, tuple[int, ...]]:
    """Return the GPUs in use on each node, of `most` in all: users' texts can name more, which are not unfolded."""
    found: dict[str, set[int]] = {}
    for nodes, indices in held:
        with contextlib.suppress(ValueError):
            if (count := name_count(nodes)) <= most:
                most -= count
                for name in names_in(nodes):
                    found.setdefault(name, set()).update(indices)
    return {name: tuple(sorted(indices)) for name, indices in found.items()}


def _lacks_indices(node: Node) -> bool:
    """Whether it matters which of a node's GPUs are free, and its record does not tell."""
    used = node.gpus_allocated
    return bool(node.gpu_islands) and 0 < used < node.gpu_count and len(node.gpus_in_use) != used


def _text(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_LARGEST)


_RESERVATION_FIELD: Final = re.compile(r"(?:^|\s)([A-Za-z]+)=(\S*)")
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
        """Return the reservations; `nodes` as they are now."""
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
    """Parse `scontrol show reservation --oneliner`; an unreadable line is left out."""
    reservations = _readable("reservation", table, "ReservationName=", _reservation)
    return tuple(sorted(reservations, key=lambda each: each.name))


def _reservation(line: str) -> Reservation:
    fields = {name: "" if value == "(null)" else value for name, value in reversed(_RESERVATION_FIELD.findall(line))}
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


_GATE: Final = f"reservationname={GATE_LICENSE}"
_MISSING: Final = "requested reservation is invalid"
_TOTAL: Final = re.compile(r"Total=(\d+)")


def extend_lease(commands: SlurmCommands, end_s: float) -> bool:
    """Let the reservation end at a time, making it where there is none; return whether it was made.

    Args:
        commands: Runs commands.
        end_s: Seconds since the epoch; a time that has passed counts as the next second.

    Raises:
        NoGateLicenseError: Slurm has no such license.
        GatewayError: Slurm refused.
    """
    # A time from now on needs no time zone, and no clock that agrees with slurmctld's.
    end = f"endtime=now+{max(1, round(end_s - time.time()))}"
    try:
        commands.run(f"extend the reservation {GATE_LICENSE}", ["scontrol", "update", _GATE, end])
    except GatewayError as error:
        if _MISSING not in str(error).lower():
            raise
        licenses = f"licenses={GATE_LICENSE}:{_total(commands)}"
        arguments = [_GATE, "flags=LICENSE_ONLY", licenses, "user=root", "starttime=now", end]
        commands.run(f"make the reservation {GATE_LICENSE}", ["scontrol", "create", "reservation", *arguments])
        return True
    return False


def end_lease(commands: SlurmCommands) -> None:
    """Delete the reservation; no error where there is none.

    Raises:
        GatewayError: Slurm refused.
    """
    try:
        commands.run(f"delete the reservation {GATE_LICENSE}", ["scontrol", "delete", _GATE])
    except GatewayError as error:
        if _MISSING not in str(error).lower():
            raise


def _total(commands: SlurmCommands) -> int:
    """Return the number of licenses `muri_gate`."""
    show = ["scontrol", "show", "license", GATE_LICENSE, "--oneliner"]
    try:
        text = commands.run(f"read the license {GATE_LICENSE}", show)
    except SlurmUnreachableError:
        raise
    except GatewayError:  # Slurm 22.05 prints nothing instead
        text = ""
    match = _TOTAL.search(text)
    if match is None:
        raise NoGateLicenseError(
            f"Slurm has no license {GATE_LICENSE}: add Licenses={GATE_LICENSE}:1000000 to slurm.conf and run "
            "`scontrol reconfigure`, or let Muri hold the jobs that wait for it"
        )
    return int(match[1])
