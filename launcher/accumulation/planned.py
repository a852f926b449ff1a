"""Into how many micro-batches the calling script's batches are to be split."""

import os
import sys
from collections.abc import Mapping
from typing import Final

from muri.errors import UsageError

ACCUMULATE_VARIABLE: Final = "MURI_ACCUMULATE"
"""Hooks split the batches of a script that calls nothing: into so many, or "auto": as many as the scheduler chose."""

STEPS_VARIABLE: Final = "MURI_ACCUMULATE_STEPS"
"""What the scheduler chose for a script that can; without effect on one that neither calls nor asks for it."""

AUTO: Final = "auto"


class AccumulateError(UsageError, ValueError):
    """A number of micro-batches, or a batch, that makes no sense."""


def steps_from(value: str, source: str) -> int:
    """A number of micro-batches from text.

    Raises:
        AccumulateError: It is no whole number of 1 or more.
    """
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise AccumulateError(f"{source}: {value!r} is no number of micro-batches; give a whole number of 1 or more")
    return int(value)


def check_option(given: str) -> None:
    """Check what `--accumulate` was given.

    Raises:
        AccumulateError: It is neither a whole number of 1 or more nor "auto".
    """
    if given != AUTO:
        try:
            steps_from(given, "--accumulate")
        except AccumulateError as error:
            raise AccumulateError(f"{error}, or {AUTO}") from None


def scheduled_steps(environment: Mapping[str, str]) -> int:
    """What the scheduler chose; 1 where it chose nothing."""
    return _read(environment, STEPS_VARIABLE)


def hooked_steps(environment: Mapping[str, str]) -> int:
    """Into how many micro-batches hooks split the script's batches; 1: they leave them whole."""
    if environment.get(ACCUMULATE_VARIABLE) == AUTO:
        return scheduled_steps(environment)
    return _read(environment, ACCUMULATE_VARIABLE)


def chosen_steps() -> int:
    """The number for a script that leaves it to whoever runs it: the scheduler, else `muri run --accumulate N`."""
    scheduled = scheduled_steps(os.environ)
    return scheduled if scheduled > 1 else hooked_steps(os.environ)


def hooks_wanted(environment: Mapping[str, str]) -> bool:
    """Whether batches of a script that calls nothing are to be split."""
    return hooked_steps(environment) > 1


def _read(environment: Mapping[str, str], name: str) -> int:
    """A variable's number; one that is none costs the script its micro-batches, not its run."""
    try:
        return steps_from(environment.get(name) or "1", name)
    except AccumulateError as error:
        print(f"muri: {error}; batches stay whole", file=sys.stderr)
        return 1
