"""One thread per script that sends gradients, in the order in which backward hands them over."""

import queue
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from muri.launcher.automatic.watch import SYNCHRONIZE, Watch, thread

IDLE_END_S: Final = 5.0
"""A communication thread without work ends after that time."""

_POLL_S: Final = 0.2
"""Signals reach a script that waits at least this often."""

_COMMUNICATION_KEY: Final = "communication"


class Communication:
    """The communication thread of one script, a gated lane of its clock."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending = 0
        self._running = False

    def submit(self, send: Callable[[], torch.Tensor], like: torch.Tensor) -> "torch.futures.Future[torch.Tensor]":
        """Send in the thread, as the stage `synchronize`.

        Args:
            send: Sends and waits until that is done.
            like: A tensor on the device of the result.
        """
        devices = [like.device] if like.is_cuda else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
        stream = torch.cuda.current_stream(like.device) if like.is_cuda else None
        with self._changed:
            self._pending += 1
            self._jobs.put(lambda: self._do(send, future, stream))
            if not self._running:
                self._running = True
                threading.Thread(target=self._work, name="communication", daemon=True).start()
        return future

    def wait_until_idle(self) -> None:
        """Wait until everything was sent."""
        with self._changed:
            while self._pending:
                self._changed.wait(_POLL_S)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to send."""
        return self._pending == 0

    def _work(self) -> None:
        thread.busy = True
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_END_S)
            except queue.Empty:
                with self._changed:
                    if self._jobs.empty():
                        self._running = False
                        return
                continue
            job()

    def _do(self, send: Callable[[], torch.Tensor], future: "torch.futures.Future[torch.Tensor]", stream: Any) -> None:
        clock = self._watch.clock
        try:
            with torch.cuda.stream(stream), torch.no_grad(), clock.lane():
                clock.enter(SYNCHRONIZE)
                try:
                    result = send()
                finally:
                    clock.leave()
                future.set_result(result)
        except BaseException as error:  # also the end of the script, while this waited for the network
            failure = error if isinstance(error, Exception) else RuntimeError(f"gradients were not sent: {error!r}")
            future.set_exception(failure)  # type: ignore[arg-type]
        finally:
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()


def communication_of(watch: Watch) -> Communication:
    """The script's communication thread."""
    found: Communication = watch.memory.setdefault(_COMMUNICATION_KEY, Communication(watch))
    return found


def drain(watch: Watch) -> None:
    """Wait until the communication thread has sent everything, without holding a resource."""
    found: Communication | None = watch.memory.get(_COMMUNICATION_KEY)
    if found is not None and not found.idle:
        with watch.clock.suspended():
            found.wait_until_idle()
