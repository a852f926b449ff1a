"""What a controller finds around it besides Slurm: the clock, the accounts, and who tells it to stop."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from muri.clock import MACHINE_CLOCK, Clock
from muri.slurm_plugin.execute.apply import StopFlag
from muri.slurm_plugin.gateway.accounting import Accounting
from muri.slurm_plugin.gateway.gres_conf import GresConf, default_path
from muri.slurm_plugin.records.journal import random_token


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The machine's own by default; the twin has others, so that the same seed gives the same course.

    Attributes:
        stop: Ends a cycle between two calls.
        clock: Tells the time and waits.
        accounting: Slurm's accounts, None for those of this machine's commands.
        new_token: Names an intent.
        gres_conf: Tells which GPUs of a node are near each other.
    """

    stop: StopFlag = field(default_factory=threading.Event)
    clock: Clock = MACHINE_CLOCK
    accounting: Accounting | None = None
    new_token: Callable[[], str] = random_token
    gres_conf: GresConf = field(default_factory=lambda: GresConf(default_path()))
