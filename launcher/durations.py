"""Durations that are set in the environment."""

import math
import time
from collections.abc import Mapping
from typing import Final

from muri.errors import UsageError

ATTACH_TIMEOUT_VARIABLE: Final = "MURI_ATTACH_TIMEOUT_S"
ATTACH_TIMEOUT_S: Final = 120.0

REQUEUE_WAIT_VARIABLE: Final = "MURI_REQUEUE_WAIT_S"
REQUEUE_WAIT_S: Final = 60.0
"""How long a process waits for Slurm to end it after its job was put back into the queue."""


def seconds_of(environment: Mapping[str, str], name: str, default_s: float, zero: str = "") -> float:
    """The seconds that a variable holds.

    Args:
        environment: Where the variable may be set.
        name: Of the variable.
        default_s: What holds while it is unset or empty.
        zero: What 0 means, for the error's text.

    Raises:
        UsageError: It holds no finite number ≥ 0.
    """
    text = environment.get(name)
    if not text:
        return default_s
    try:
        value_s = float(text)
    except ValueError:
        value_s = -1.0
    if not 0 <= value_s < math.inf:
        hint = f", or 0 {zero}" if zero else ""
        raise UsageError(f"{name}={text!r} is not a number of seconds ≥ 0; give for example {default_s:g}{hint}")
    return value_s


def attach_timeout_s(environment: Mapping[str, str]) -> float:
    """How long a member waits for its group's runtime; see `seconds_of` for the error."""
    return seconds_of(environment, ATTACH_TIMEOUT_VARIABLE, ATTACH_TIMEOUT_S)


def requeue_wait_s(environment: Mapping[str, str]) -> float:
    """How long to wait for Slurm to end this process after a requeue; see `seconds_of` for the error."""
    return seconds_of(environment, REQUEUE_WAIT_VARIABLE, REQUEUE_WAIT_S)


def wait_for_end(environment: Mapping[str, str]) -> None:
    """Wait for Slurm to end this process, whose job was put back into the queue."""
    time.sleep(requeue_wait_s(environment))
