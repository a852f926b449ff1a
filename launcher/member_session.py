"""What the server and the member table ask of a session, whether it is a thread or a process."""

import threading
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from muri.launcher.clock import StageClock
from muri.launcher.hangs.family import Roots


@runtime_checkable
class MemberSession(Protocol):
    """One run of a member's script; `session.Session` in a thread, `processes.session.ProcessSession` in a process.

    Attributes:
        member: The member's job id.
        clock: Its stage times.
        exit_code: The script's exit code, None until it ended.
        stopped_at: Iteration at which the script was saved and stopped, None if it ended in another way.
        ended: Set when the script ended and everything of it was cleared away.
        fault: What the script raised if that ended the CUDA context of this process, else None.
        condemned: Whether its exit code means nothing because the CUDA context has ended.
        out_of_memory: Whether the script ended for want of GPU memory.
        hung: Whether it is being ended, or was, because it hangs.
    """

    member: str
    clock: StageClock
    exit_code: int | None
    stopped_at: int | None
    ended: threading.Event
    fault: str | None
    condemned: bool
    out_of_memory: bool
    hung: bool

    @property
    def isolation(self) -> str:
        """Either "thread" or "process"."""

    @property
    def checkpointed(self) -> bool:
        """Whether the script has told the runtime how to save it."""

    @property
    def lost(self) -> bool:
        """Whether the runtime's end cut the script short, so that its exit code means nothing."""

    def start(self, on_end: "Callable[[MemberSession], None]") -> None:
        """Run the script; `on_end` is called once, when the exit code is known."""

    def deliver(self, signum: int) -> None:
        """Do what the signal would do to a process that runs the script."""

    def end(self, signum: int, grace_s: float = ...) -> None:
        """End the script with a signal's default action, and insist on it after `grace_s` seconds."""

    def end_as_hung(self, cause: str) -> None:
        """End a script that hangs: the cause goes to its standard error, and its exit code is `HUNG_EXIT_CODE`."""

    def roots(self) -> Roots:
        """Where the threads and processes begin that work for the script."""

    def environment(self) -> Mapping[str, str]:
        """The member's environment, as it was handed over."""

    def shut_down(self, grace_s: float) -> None:
        """The runtime ends: let the script's own SIGTERM handler work, else end it."""

    def detach_output(self) -> None:
        """The member's own process is gone: what the script still writes goes nowhere."""
