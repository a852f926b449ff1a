"""A member's session, as the runtime sees it: one run of the member's script, and the processes that work for it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from muri.launcher.job.stage_clock import StageClock


@dataclass(frozen=True)
class Roots:
    """Where a member's threads and processes begin."""

    threads: tuple[int, ...] = ()  # the kernel's numbers of its threads in this process
    process: int = 0  # the script's own process, 0 for none
    supervisor: int = 0  # the process between that one and this, 0 for none


@runtime_checkable
class MemberSession(Protocol):
    """One run of a member's script; `sessions.process_session.ProcessSession`, or a thread (`launcher.threads`)."""

    member: str  # its job id
    clock: StageClock
    exit_code: int | None  # of the script, None until it ended
    stopped_at: int | None  # iteration at which the script was saved and stopped, None if it ended in another way
    ended: threading.Event  # set when the script ended and was cleaned up
    fault: str | None  # the script's error if that ended the CUDA context of this process, else None
    lost_cause: str | None  # why the script must run again; None if it need not, or if the runtime's end is why
    condemned: bool  # its exit code means nothing, because the CUDA context has ended
    out_of_memory: bool  # the script ended for lack of GPU memory
    hung: bool  # it is being ended, or was, because it hangs
    paused: bool  # its job is suspended
    client_pid: int  # process in which `muri run` waits for the end; 0 once it is gone, or if it cannot be seen

    @property
    def isolation(self) -> str:
        """Either "thread" or "process"."""

    @property
    def checkpointed(self) -> bool:
        """Whether the script has told the runtime how to save it."""

    @property
    def lost(self) -> bool:
        """Whether the runtime's end cut the script short, so that its exit code means nothing."""

    def start(self, on_end: Callable[[MemberSession], None]) -> None:
        """Run the script; `on_end` is called once, when the exit code is known."""

    def deliver(self, signum: int) -> None:
        """Act as the signal would on a process that runs the script."""

    def end(self, signum: int, grace_s: float = ...) -> None:
        """End the script with a signal's default action, and insist on it after `grace_s` seconds."""

    def end_as_hung(self, cause: str) -> None:
        """End a script that hangs: the cause goes to its standard error, and its exit code is `HUNG_EXIT_CODE`."""

    def stop(self) -> None:
        """Stop the script's process, if it has one of its own, as SIGSTOP would."""

    def go_on(self) -> None:
        """Continue what `stop` has stopped."""

    def roots(self) -> Roots:
        """Where the threads and processes begin that work for the script."""

    def environment(self) -> Mapping[str, str]:
        """The member's environment, as it was handed over."""

    def python(self) -> Mapping[str, str]:
        """The script's Python: its "prefix" and "executable"."""

    def facts(self) -> Mapping[str, Any] | None:
        """Return the script's facts beside its iterations (`launcher.script.script_facts`), None before."""

    def shut_down(self, grace_s: float) -> None:
        """Let the script's own SIGTERM handler work, else end the script, because the runtime ends."""

    def detach_output(self) -> None:
        """Discard what the script still writes, because the member's own process is gone."""


MURIS_OWN: Final = "muri-looks"
"""The kernel's name for a thread of Muri's own in a script's process, whose work is not the script's."""


def name_as_muris_own() -> None:
    """Give the calling thread that name, which other processes can read."""
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(MURIS_OWN)


def threads_of(pid: int) -> list[Path]:
    """All threads of a process; none if it has ended."""
    with contextlib.suppress(OSError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []


def children_of(threads: Iterable[Path]) -> Iterator[int]:
    """The processes that these threads have started and that still exist."""
    for thread in threads:
        with contextlib.suppress(OSError):
            yield from map(int, (thread / "children").read_text().split())


def descendants_of(root: int) -> Iterator[int]:
    """All processes that descend from one; parents come before their children."""
    waiting = [root]
    while waiting:
        children = list(children_of(threads_of(waiting.pop(0))))
        yield from children
        waiting.extend(children)


def threads_of_trees(pids: Iterable[int]) -> Iterator[Path]:
    """All threads of these processes and of their descendants."""
    waiting = list(pids)
    while waiting:
        threads = threads_of(waiting.pop())
        yield from threads
        waiting.extend(children_of(threads))


MOST_ROUNDS: Final = 10
"""A process may start others before its own turn to be stopped comes; those are found in the next round."""


def stop_descendants(root: int) -> None:
    """Stop all processes that descend from one, but not that one itself. 0 is not a process."""
    stopped: set[int] = set()
    for _ in range(MOST_ROUNDS if root else 0):
        new = [pid for pid in descendants_of(root) if pid not in stopped]
        if not new:
            return
        _send(signal.SIGSTOP, new)
        stopped.update(new)


def continue_descendants(root: int) -> None:
    """Continue all processes that descend from one. 0 is not a process."""
    if root:
        _send(signal.SIGCONT, list(descendants_of(root)))


def _send(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
