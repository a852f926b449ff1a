"""A job of two seconds for `muri doctor --try`: as good as all of it in one stage, and an exit code of its own."""

import sys
import time
from typing import Final

import muri
from muri.profiler.records import STAGES

ITERATION_S: Final = 0.1
SLOW_S: Final = 0.07
QUICK_S: Final = 0.01
_ITERATIONS: Final = 20


def main(slow: str, code: int) -> int:
    """Train nothing.

    Args:
        slow: The stage that takes most of an iteration.
        code: To end with.
    """
    for _ in range(_ITERATIONS):
        for stage in STAGES:
            with muri.stage(stage):
                time.sleep(SLOW_S if stage == slow else QUICK_S)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
