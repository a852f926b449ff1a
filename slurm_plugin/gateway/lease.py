"""Withholds the licence `muri_gate` by a reservation that ends by itself unless it is extended."""

import re
import time
from typing import Final

from muri.slurm_plugin.gateway.base import GatewayError, NoGateLicenseError, SlurmUnreachableError
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.records.gate import GATE_LICENSE

_NAME: Final = f"reservationname={GATE_LICENSE}"

_MISSING: Final = "requested reservation is invalid"

_TOTAL: Final = re.compile(r"Total=(\d+)")


def extend_lease(commands: SlurmCommands, end_s: float) -> bool:
    """Let the reservation end at a time, making it where there is none; return whether it was made.

    Args:
        commands: How commands are run.
        end_s: Seconds since the epoch; a time that has passed counts as the next second.

    Raises:
        NoGateLicenseError: Slurm has no such licence.
        GatewayError: Slurm refused.
    """
    # A time from now on needs no time zone, and no clock that agrees with slurmctld's.
    end = f"endtime=now+{max(1, round(end_s - time.time()))}"
    try:
        commands.run(f"extend the reservation {GATE_LICENSE}", ["scontrol", "update", _NAME, end])
    except GatewayError as error:
        if not _is_missing(error):
            raise
        _withhold(commands, end)
        return True
    return False


def end_lease(commands: SlurmCommands) -> None:
    """Delete the reservation; no error where there is none.

    Raises:
        GatewayError: Slurm refused.
    """
    try:
        commands.run(f"delete the reservation {GATE_LICENSE}", ["scontrol", "delete", _NAME])
    except GatewayError as error:
        if not _is_missing(error):
            raise


def _withhold(commands: SlurmCommands, end: str) -> None:
    licenses = f"licenses={GATE_LICENSE}:{_total(commands)}"
    arguments = [_NAME, "flags=LICENSE_ONLY", licenses, "user=root", "starttime=now", end]
    commands.run(f"make the reservation {GATE_LICENSE}", ["scontrol", "create", "reservation", *arguments])


def _total(commands: SlurmCommands) -> int:
    """Return how many of the licence there are."""
    try:
        text = commands.run(
            f"read the licence {GATE_LICENSE}", ["scontrol", "show", "license", GATE_LICENSE, "--oneliner"]
        )
    except SlurmUnreachableError:
        raise
    except GatewayError:  # Slurm 22.05 prints nothing instead
        text = ""
    match = _TOTAL.search(text)
    if match is None:
        raise NoGateLicenseError(
            f"Slurm has no licence {GATE_LICENSE}: add Licenses={GATE_LICENSE}:1000000 to slurm.conf and run "
            "`scontrol reconfigure`, or let Muri hold the jobs that wait for it"
        )
    return int(match[1])


def _is_missing(error: GatewayError) -> bool:
    return _MISSING in str(error).lower()
