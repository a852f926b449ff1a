"""What a controller finds around it besides Slurm: the clock, the accounts, and names for what it begins."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from muri.clock import MACHINE_CLOCK, Clock
from muri.slurm_plugin.gateway.accounting import Accounting


def random_token() -> str:
    """A name that nobody can guess or has used before."""
    return secrets.token_hex(6)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The machine's own by default; the twin has others, so that the same seed gives the same course.

    Attributes:
        clock: Tells the time and waits.
        accounting: Slurm's accounts, None for those of this machine's commands.
        new_token: Names an intent.
    """

    clock: Clock = MACHINE_CLOCK
    accounting: Accounting | None = None
    new_token: Callable[[], str] = random_token


MACHINE = Surroundings()
