"""The way to members that are threads: nothing else knows of `launcher/shared_process`, or loads it.

Most groups have no such member. A script's own process looks only for what would keep it from being a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from muri.group_spec import MemberSpec
    from muri.launcher.arbitration.arbiter import Arbiter
    from muri.launcher.job.stage_clock import IntervalListener
    from muri.launcher.protocol import AttachRequest
    from muri.launcher.sessions.setup import MemberSession

_ROOM: Final = "muri.launcher.shared_process"


class SharedProcess(Protocol):
    """A runtime that runs scripts in threads of its own process; `shared_process.thread_session.Threads`."""

    def install(self) -> None:
        """Let this process hold several scripts; call it from the main thread, before any session starts."""

    def preload(self) -> None:
        """Load what the scripts will import, and prepare the GPU."""

    def takes(self, request: AttachRequest) -> bool:
        """Whether a script runs as a thread: it is planned so, its user agrees, and its Python is this one."""

    def session(
        self,
        request: AttachRequest,
        files: tuple[int, int, int],
        arbiter: Arbiter,
        on_interval: IntervalListener | None,
        spec: MemberSpec,
    ) -> MemberSession:
        """Return a session that has not started; see `sessions.process_session.ProcessSession` for the arguments."""

    def gpu_mem_gib(self) -> float | None:
        """Memory of the GPU that this process has prepared, None where it has none."""

    def session_ended(self, session: MemberSession) -> None:
        """Look whether the GPU's context has ended with a session; called before the member learns of its end."""

    def fault(self) -> dict[str, Any] | None:
        """Why this process can't go on, as the status file has it; None while it can."""


def shared_process(
    members: frozenset[str],
    preload: list[str],
    running: Callable[[], list[MemberSession]],
    end_runtime: Callable[[], None],
    *,
    takes_turns: bool,
) -> SharedProcess:
    """Return a runtime that runs members as threads of this process.

    `members` are the job ids that are planned so, `preload` modules to load ahead. `running` tells the sessions under
    way, of either kind; `end_runtime` ends this process, because its GPU context has ended. If it `takes_turns`,
    members' kernels must not overlap.
    """
    made: SharedProcess = import_module(f"{_ROOM}.thread_session").Threads(
        members, preload, running, end_runtime, takes_turns=takes_turns
    )
    return made


class Script(Protocol):
    """One of several scripts of this process; each module of the launcher keeps belongings of it under its own key."""

    belongings: dict[Any, Any]


class _Scripts:
    look_up: Callable[[], Script | None] = staticmethod(lambda: None)


def current_script() -> Script | None:
    """Return the calling thread's script; None in a process that has one script, or from no script's thread."""
    return _Scripts.look_up()


def tell_scripts_apart(look_up: Callable[[], Script | None]) -> None:
    """Set what finds a thread's script."""
    _Scripts.look_up = staticmethod(look_up)


class DangerWatch(Protocol):
    """Notes what the script of this process does that threads couldn't keep apart."""

    def watch_lock(self) -> None:
        """Begin to look at the interpreter's lock: the script's first iteration is over."""

    def found(self) -> tuple[str, ...]:
        """Return the names of all dangers so far (`muri.profiler.records`), sorted; the lock is looked at no more."""


_begun: Final[list[DangerWatch]] = []


def watch_dangers(own_directory: str) -> None:
    """Watch this process from now on; its script's own modules are in that directory."""
    _begun.append(import_module(f"{_ROOM}.danger_watch").DangerWatch(own_directory))


def danger_watch() -> DangerWatch | None:
    """Return the watch of this process, None where there is none."""
    return _begun[0] if _begun else None
