"""The lease of a running job, as its training loop sees it.

Synergy's jobs ask for a new lease at the end of each round, and checkpoint when they get none (section 4.3). Here it
is renewed by itself as long as nobody asks the job to stop; a request takes effect at an iteration boundary. So no
message is needed for the usual case.
"""

from __future__ import annotations

from typing import NamedTuple

from muri.launcher.checkpoints import registry


class Lease(NamedTuple):
    """Whether a job may go on.

    Attributes:
        renewed: False once the job was asked to stop: it is saved and ended at the end of this training iteration.
        revocable: Whether the script has called `muri.checkpoint`. Muri stops no job without one.
    """

    renewed: bool = True
    revocable: bool = False


def current_lease() -> Lease:
    """The calling script's lease."""
    checkpointer = registry.current()
    return Lease() if checkpointer is None else Lease(not checkpointer.stop_asked, True)
