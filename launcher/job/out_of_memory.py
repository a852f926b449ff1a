"""Errors of a script that ran out of GPU memory: beside others the scheduler may be at fault.

In a process of its own the script leaves a mark in a file that the runtime named, because its exit code does not show
the cause.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MARK_VARIABLE: Final = "MURI_OUT_OF_MEMORY_MARK"
"""Names the file that a script in a process of its own makes when it ends so; the script doesn't see the variable."""

_WORDS: Final = re.compile(
    r"(CUDA|HIP)( error:)? out of memory|CUBLAS_STATUS_ALLOC_FAILED|RESOURCE_EXHAUSTED: Out of memory"
)


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that led to it, the last one first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that led to it, is PyTorch's, JAX's or CUDA's for lack of GPU memory."""
    return any(
        isinstance(link, RuntimeError) and (type(link).__name__ == "OutOfMemoryError" or _WORDS.search(str(link)))
        for link in chain_of(error)
    )


def leave_mark(error: BaseException, mark: str) -> None:
    """Tell the runtime, if it named a file for that, that the script ends for lack of GPU memory."""
    if mark and is_out_of_memory(error):
        with contextlib.suppress(OSError):
            Path(mark).touch()
