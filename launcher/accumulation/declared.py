"""Whether the script of this process has said that its batches can be split, which a dry run tells the scheduler."""

import threading
from collections.abc import Mapping
from typing import Final

from muri.launcher.accumulation.planned import ACCUMULATE_VARIABLE, AUTO

_said: Final = threading.Event()


def declare() -> None:
    """The script leaves the number of micro-batches to whoever runs it."""
    _said.set()


def is_declared(environment: Mapping[str, str]) -> bool:
    """Whether the script has said so, or the command that runs it: `muri run --accumulate auto`."""
    return _said.is_set() or environment.get(ACCUMULATE_VARIABLE) == AUTO
