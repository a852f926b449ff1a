"""What a script does that threads of one process could not keep apart, as a measurement notes it.

`muri.launcher.shared_process.danger_watch` finds it, planning heeds it, people read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

DANGERS: Final[Mapping[str, str]] = {
    "accelerate": "accelerate or transformers",
    "children": "DataLoader workers or other child processes",
    "compile": "torch.compile",
    "environment": "a changed environment",
    "interpreter": "much Python code, or too short iterations to tell",
    "native": "ctypes or extension modules of its own",
    "packages": "packages of which Muri does not know that threads can share them",
    "patches": "patched functions of Python or PyTorch",
    "paths": "a changed sys.path",
    "ranks": "process groups",
    "settings": "resource limits, cores, priority or locale of its own",
    "signals": "signal handlers or timers",
    "threads": "threads or executors of its own",
}
"""By name, what a run used; the name goes through a job's comment, which is short."""

NAME: Final = re.compile("[a-z]{1,16}")
"""A newer version may know more of them."""

MOST: Final = 32


def said(dangers: Iterable[str]) -> str:
    """Return dangers as people read them."""
    return ", ".join(DANGERS.get(name, name) for name in dangers)
