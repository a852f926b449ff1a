"""The tables of nodes and reservations through libslurm's public API, in one RPC each.

pyslurm's `Nodes.load()` asks for the partitions as well, and shows allocated GPUs only where slurmdbd tracks
them. libslurm's own printing function has neither flaw, and unlike its structures, its text and its functions'
signatures are the same from release to release.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.gateway.slurm_commands import decoded

_SHOW_ALL = 0x0001
_SHOW_DETAIL = 0x0002
#: libslurm counts its interface: the number in libslurm.so.45 → Slurm's release.
_RELEASES = {38: "22.05", 39: "23.02", 40: "23.11", 41: "24.05", 42: "24.11", 43: "25.05", 44: "25.11", 45: "26.05"}


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
    def _memory_stream(self) -> Iterator[tuple[int, list[str]]]:
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
            content.append(decoded(text))
