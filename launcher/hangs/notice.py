"""How a member that hangs is told of its end."""

import contextlib
import os
import threading
from typing import Final

HUNG_EXIT_CODE: Final = 124
"""Exit code of a script that was ended because it hung; timeout(1) uses the same."""

HUNG_GRACE_S: Final = 2.0
"""A script that hangs hardly ends by itself: after that time it is given up, or its process killed."""


def tell(file: int, cause: str) -> None:
    """Write the cause to a member's standard error, from a thread: what hangs may be the reader of that file."""
    copy = os.dup(file)

    def write() -> None:
        with contextlib.suppress(OSError), os.fdopen(copy, "w") as stream:
            stream.write(f"muri: {cause}\n")

    threading.Thread(target=write, name="notice", daemon=True).start()


def code_of(code: int, *, hung: bool) -> int:
    """The exit code to report for a script: its own, unless it was ended for hanging."""
    return HUNG_EXIT_CODE if hung and code > 128 else code
