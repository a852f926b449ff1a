"""The tables of nodes and reservations through libslurm's public API, in one RPC each.

pyslurm's `Nodes.load()` asks for the partitions as well, and shows allocated GPUs only where slurmdbd tracks
them. libslurm's own printing function has neither flaw, and unlike its structures, its text and its functions'
signatures are the same from release to release.
"""

import ctypes
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from muri.slurm_plugin.gateway import text_fields
from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.records.cluster import Node

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

_SHOW_ALL = 0x0001
_SHOW_DETAIL = 0x0002
#: libslurm counts its interface: the number in libslurm.so.45 → Slurm's release.
_RELEASES = {38: "22.05", 39: "23.02", 40: "23.11", 41: "24.05", 42: "24.11", 43: "25.05", 44: "25.11", 45: "26.05"}
_FIELD = re.compile(r"(?:^|\s)([A-Za-z]+)=(\S*)")


class LibslurmError(GatewayError):
    """libslurm does not offer what is needed; the caller has another way."""


class Libslurm:
    """The copy of libslurm that pyslurm has loaded into this process."""

    def __init__(self) -> None:
        try:
            self._slurm = ctypes.CDLL(None, use_errno=True)
            self._libc = ctypes.CDLL("libc.so.6")
            self._declare()
        except (AttributeError, OSError) as err:
            raise LibslurmError(f"libslurm cannot be called: {err}") from err

    def _declare(self) -> None:
        pointer = ctypes.c_void_p
        self._slurm.slurm_api_version.restype = ctypes.c_long
        load = self._slurm.slurm_load_node
        load.argtypes = [ctypes.c_long, ctypes.POINTER(pointer), ctypes.c_uint16]
        self._slurm.slurm_print_node_info_msg.argtypes = [pointer, pointer, ctypes.c_int]
        self._slurm.slurm_print_node_info_msg.restype = None
        self._slurm.slurm_free_node_info_msg.argtypes = [pointer]
        self._slurm.slurm_free_node_info_msg.restype = None
        self._slurm.slurm_load_reservations.argtypes = [ctypes.c_long, ctypes.POINTER(pointer)]
        self._slurm.slurm_print_reservation_info_msg.argtypes = [pointer, pointer, ctypes.c_int]
        self._slurm.slurm_print_reservation_info_msg.restype = None
        self._slurm.slurm_free_reservation_info_msg.argtypes = [pointer]
        self._slurm.slurm_free_reservation_info_msg.restype = None
        self._slurm.slurm_strerror.argtypes = [ctypes.c_int]
        self._slurm.slurm_strerror.restype = ctypes.c_char_p
        self._libc.open_memstream.argtypes = [ctypes.POINTER(pointer), ctypes.POINTER(ctypes.c_size_t)]
        self._libc.open_memstream.restype = pointer
        self._libc.fclose.argtypes = [pointer]
        self._libc.free.argtypes = [pointer]

    def release(self) -> str:
        """Return the release of the library that is loaded, such as "26.05"; "" when it is not known to Muri."""
        return _RELEASES.get(int(self._slurm.slurm_api_version()) >> 16 & 0xFF, "")

    def node_table(self) -> str:
        """Return the text of `scontrol --details --oneliner show nodes`, without the partitions.

        Raises:
            OSError: The RPC failed; `errno` is Slurm's error number.
        """
        library = self._slurm
        return self._table(
            lambda message: library.slurm_load_node(0, message, _SHOW_ALL | _SHOW_DETAIL),
            library.slurm_print_node_info_msg,
            library.slurm_free_node_info_msg,
        )

    def reservation_table(self) -> str:
        """Return the text of `scontrol --oneliner show reservation`.

        Raises:
            OSError: The RPC failed; `errno` is Slurm's error number.
        """
        os.environ["SLURM_TIME_FORMAT"] = "%s"  # libslurm reads it once, before it prints its first time
        library = self._slurm
        return self._table(
            lambda message: library.slurm_load_reservations(0, message),
            library.slurm_print_reservation_info_msg,
            library.slurm_free_reservation_info_msg,
        )

    def _table(self, load: Callable[[Any], int], show: Callable[..., None], free: Callable[..., None]) -> str:
        message = ctypes.c_void_p()
        ctypes.set_errno(0)
        if load(ctypes.byref(message)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, self._slurm.slurm_strerror(number).decode("utf-8", "replace"))
        try:
            with self._memory_stream() as (stream, content):
                show(stream, message, 1)
        finally:
            free(message)
        return content[0]

    @contextmanager
    def _memory_stream(self) -> "Iterator[tuple[int, list[str]]]":
        buffer, size = ctypes.c_void_p(), ctypes.c_size_t()
        stream = self._libc.open_memstream(ctypes.byref(buffer), ctypes.byref(size))
        if not stream:
            raise MemoryError("open_memstream failed")
        content: list[str] = []
        try:
            yield stream, content
        finally:
            self._libc.fclose(stream)
            text = ctypes.string_at(buffer, size.value) if buffer.value else b""
            self._libc.free(buffer)
            content.append(text.decode("utf-8", "surrogateescape"))


def nodes_of_table(table: str, partitions: Mapping[str, tuple[str, ...]]) -> tuple[Node, ...]:
    """Parse the node table, one line per node.

    Args:
        table: Text from `Libslurm.node_table`.
        partitions: Names of each node's partitions.
    """
    lines = (line for line in table.split("\n") if line.startswith("NodeName="))
    return tuple(sorted(_readable(lines, partitions), key=lambda node: node.name))


def _readable(lines: "Iterator[str]", partitions: Mapping[str, tuple[str, ...]]) -> "Iterator[Node]":
    for line in lines:
        try:
            yield _node(line, partitions)
        except (LookupError, ValueError) as error:
            log.warning("a node is left out, for its record cannot be read: %r; in %.200r", error, line)


def _node(line: str, partitions: Mapping[str, tuple[str, ...]]) -> Node:
    fields: dict[str, str] = {}
    for name, value in _FIELD.findall(line):
        fields.setdefault(name, value)  # free text such as Reason= comes last and can't replace a field
    cpus_allocated = int(fields["CPUAlloc"])
    state = text_fields.node_words(fields["State"])
    cpu_count = int(fields.get("CPUEfctv", fields["CPUTot"]))
    if 0 < cpus_allocated < cpu_count:
        # Slurm leaves it to its clients to say so of a node with some CPUs free.
        state = ["MIXED" if word == "ALLOCATED" else word for word in state]
    configured = text_fields.gres_counts(fields.get("Gres", ""))
    name = fields["NodeName"]
    return Node(
        name=name,
        usable=text_fields.node_usable(state),
        state="+".join(state),
        partitions=partitions.get(name, ()),
        cpu_count=cpu_count,
        cpus_allocated=cpus_allocated,
        gpu_count=text_fields.gpu_total(configured),
        gpus_allocated=text_fields.gpu_total(text_fields.gres_counts(fields.get("GresUsed", ""))),
        gpu_type=text_fields.gpu_type(configured),
        mem_mib=text_fields.node_mem_mib(int(fields.get("RealMemory", 0)), int(fields.get("MemSpecLimit", 0))),
        mem_allocated_mib=int(fields.get("AllocMem", 0)),
        threads_per_core=max(1, int(fields.get("ThreadsPerCore", 1))),
        features=tuple(filter(None, fields.get("AvailableFeatures", "").replace("(null)", "").split(","))),
    )
