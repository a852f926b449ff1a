"""The runtime's end of a member's process: carries its requests to the arbiter."""

import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final

from muri.launcher.arbitration.arbiter import Arbiter, WaitInterruptedError
from muri.launcher.clock import STAGE_COUNT, IntervalListener, IterationListener
from muri.launcher.processes import wire

logger = logging.getLogger("muri.launcher")


class Channels:
    """Serves all channels of one member's process, a thread for each.

    Args:
        member: The member's job id.
        arbiter: Whom its requests go to.
        on_iteration: Hears of each finished iteration before the arbiter.
        on_interval: Hears of each stage held, None when nobody wants to.
    """

    def __init__(
        self, member: str, arbiter: Arbiter, on_iteration: IterationListener, on_interval: IntervalListener | None
    ) -> None:
        self.member: Final = member
        self.arbiter: Final = arbiter
        self.on_iteration: Final = on_iteration
        self.on_interval: Final = on_interval

    def open(self, channel: socket.socket) -> None:
        """Serve a channel in the background until its other end closes."""
        served = _Channel(self, channel)
        threading.Thread(target=served.serve, name=f"channel-{self.member}", daemon=True).start()


class _Channel:
    """The requests of one thread of the script, and what it holds."""

    def __init__(self, owner: Channels, channel: socket.socket) -> None:
        self._owner = owner
        self._socket = channel
        self._held: set[int] = set()
        self._handlers: dict[int, Callable[[bytes], None]] = {
            wire.ACQUIRE: self._acquire,
            wire.YIELD: self._yield,
            wire.RELEASE: self._release,
            wire.ITERATION: self._iteration,
            wire.INTERVAL: self._interval,
            wire.CHANNEL: lambda _message: None,  # what came beside it is open already
        }

    def serve(self) -> None:
        try:
            with self._socket, contextlib.suppress(ConnectionError):
                while self._serve_one():
                    pass
        except (KeyError, struct.error, ValueError) as error:
            logger.warning("member %s: its process sent what is not understood (%r)", self._owner.member, error)
        finally:  # a thread of the script may end within a stage
            for stage in self._held:
                self._owner.arbiter.release(self._owner.member, stage)

    def _serve_one(self) -> bool:
        message, files, _, _ = socket.recv_fds(self._socket, wire.LARGEST_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        for file in files:
            self._owner.open(socket.socket(fileno=file))
        if message:
            self._handlers[message[0]](message)
        return bool(message)

    def _acquire(self, message: bytes) -> None:
        stage = _stage_of(message)
        try:
            waited_s = self._owner.arbiter.acquire(self._owner.member, stage)
        except WaitInterruptedError:
            self._answer(wire.INTERRUPTED, 0.0)
        else:
            self._held.add(stage)
            self._answer(wire.GRANTED, waited_s)

    def _yield(self, message: bytes) -> None:
        stage = _stage_of(message)
        try:
            self._answer(wire.GRANTED, self._owner.arbiter.yield_point(self._owner.member, stage))
        except WaitInterruptedError:
            self._held.discard(stage)
            self._answer(wire.INTERRUPTED, 0.0)

    def _answer(self, kind: int, waited_s: float) -> None:
        self._socket.send(wire.ANSWER.pack(kind, waited_s))

    def _release(self, message: bytes) -> None:
        stage = _stage_of(message)
        self._held.discard(stage)
        self._owner.arbiter.release(self._owner.member, stage)

    def _iteration(self, message: bytes) -> None:
        record = wire.unpack_iteration(message)
        self._owner.on_iteration(record)
        self._owner.arbiter.iteration_done(self._owner.member, record)

    def _interval(self, message: bytes) -> None:
        _, stage, start_s, end_s, wait_s = wire.INTERVAL_MESSAGE.unpack(message)
        if self._owner.on_interval is not None:
            self._owner.on_interval(stage, start_s, end_s, wait_s)


def _stage_of(message: bytes) -> int:
    _, stage = wire.STAGE_MESSAGE.unpack(message)
    if stage >= STAGE_COUNT:
        raise ValueError(f"there is no stage number {stage}")
    return int(stage)
