"""Scripts that end for want of GPU memory: beside others that may be the scheduler's doing, not the script's.

A script in a process of its own leaves a mark in a file that the runtime named, for its exit code tells nothing.
"""

import contextlib
import re
from pathlib import Path
from typing import Final

from muri.launcher.gpu.faults import chain_of

MARK_VARIABLE: Final = "MURI_OUT_OF_MEMORY_MARK"
"""Names the file that a script in a process of its own makes when it ends so; the script doesn't see the variable."""

_WORDS: Final = re.compile(r"(CUDA|HIP)( error:)? out of memory|CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that led to it, is PyTorch's or CUDA's for want of GPU memory."""
    return any(
        isinstance(link, RuntimeError) and (type(link).__name__ == "OutOfMemoryError" or _WORDS.search(str(link)))
        for link in chain_of(error)
    )


def leave_mark(error: BaseException, mark: str) -> None:
    """Tell the runtime, if it named a file for that, that the script ends for want of GPU memory."""
    if mark and is_out_of_memory(error):
        with contextlib.suppress(OSError):
            Path(mark).touch()
