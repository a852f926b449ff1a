"""A controller's surroundings: its stop signal, clock and accounts, and how GPUs can be taken from waiting jobs.

The latter is tried once for each start of slurmctld.
"""

import logging
import os
import select
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from muri.clock import MACHINE_CLOCK, Clock
from muri.files import atomic_json
from muri.slurm_plugin.execute.apply import StopFlag
from muri.slurm_plugin.gateway.accounting import Accounting
from muri.slurm_plugin.gateway.base import Gateway, GatewayError, SlurmUnreachableError
from muri.slurm_plugin.gateway.gpu_removal import place_for
from muri.slurm_plugin.gateway.tables import GresConf, default_path
from muri.slurm_plugin.records.cluster import Job, JobState, Snapshot
from muri.slurm_plugin.records.comment_tags import REQUEST_PREFIX, token
from muri.slurm_plugin.records.journal import random_token
from muri.slurm_plugin.records.limits import NOT_TRIED, GpuRemoval


class StopSignal:
    """Whether this process was told to stop by SIGTERM or SIGINT.

    It takes no lock, unlike threading.Event: the handler may interrupt `wait` while that holds the lock.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._woken, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)

    def heed_signals(self) -> None:
        """Let both signals set it, instead of ending the process."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.set())

    def set(self) -> None:
        """Tell it to stop."""
        if not self._is_set:
            self._is_set = True
            os.write(self._wakes, b"!")

    def is_set(self) -> bool:
        """Whether to stop now."""
        return self._is_set

    def wait(self, timeout: float) -> bool:
        """Sleep until told to stop, at most `timeout` seconds."""
        select.select([self._woken], [], [], timeout)
        return self._is_set


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The machine's own by default; the twin has others, so that the same seed gives the same course."""

    stop: StopFlag = field(default_factory=threading.Event)  # Ends a cycle between two calls
    clock: Clock = MACHINE_CLOCK  # The clock to read and to wait by
    accounting: Accounting | None = None  # Slurm's accounts, None for those of this machine's commands
    new_token: Callable[[], str] = random_token  # Names an intent
    # Which GPUs of a node are near each other
    gres_conf: GresConf = field(default_factory=lambda: GresConf(default_path()))


log = logging.getLogger(__name__)

FILE_NAME: Final = "gpu-removal.json"

_FORM: Final = TypeAdapter(GpuRemoval)
_LOOK_AGAIN_S: Final = 60.0


def read_gpu_removal(state_dir: Path) -> GpuRemoval:
    """Return the outcome that a state directory keeps; where it is missing or damaged, `NOT_TRIED`."""
    try:
        return _FORM.validate_json((state_dir / FILE_NAME).read_bytes())
    except (OSError, ValidationError):
        return NOT_TRIED


class GpuRemovalFile:
    """Tries how GPUs can be taken away, if it may, and keeps the outcome in the state directory."""

    def __init__(self, state_dir: Path, partitions: tuple[str, ...], *, may_try: bool = True) -> None:
        self._state_dir = state_dir
        self._partitions = partitions
        self._may_try = may_try
        self._looked_s = float("-inf")
        self._current = NOT_TRIED

    def current(self, gateway: Gateway, snapshot: Snapshot) -> GpuRemoval:
        """Return the present outcome; without one there are no groups.

        It is tried when a first job waits for Muri, and again when slurmctld has been restarted.
        """
        pending = (job for job in snapshot.jobs if job.state is JobState.PENDING)
        waiting = next((job for job in pending if token(job.admin_comment, REQUEST_PREFIX) is not None), None)
        if not self._may_try or waiting is None:
            return read_gpu_removal(self._state_dir)
        if 0 <= snapshot.taken_s - self._looked_s < _LOOK_AGAIN_S:
            return self._current
        self._current = self._try(gateway, snapshot, waiting)
        self._looked_s = snapshot.taken_s
        return self._current

    def _try(self, gateway: Gateway, snapshot: Snapshot, waiting: Job) -> GpuRemoval:
        known = read_gpu_removal(self._state_dir)
        place = place_for(snapshot.nodes, self._partitions, snapshot.limits)
        if place is None:  # by the configuration and today's nodes, not by Slurm: it is not kept
            served = f": {', '.join(self._partitions)}" if self._partitions else ""
            return GpuRemoval(why=f"no node with GPUs is in a partition that Muri serves{served}")
        try:
            outcome = gateway.gpu_removal(known, place, waiting, snapshot.taken_s)
        except SlurmUnreachableError:
            raise
        except GatewayError as error:
            log.warning("jobs run alone: it cannot be tried whether their GPUs can be taken away: %s", error)
            return GpuRemoval(why=str(error))
        if outcome != known:
            try:
                atomic_json(self._state_dir / FILE_NAME, asdict(outcome), mode=0o600)
            except OSError as error:
                log.warning("the outcome of taking GPUs away cannot be kept: %s", error)
        return outcome
