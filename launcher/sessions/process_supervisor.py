"""Stands between the runtime and a member's process, so that neither leaves anything behind.

Started by `process_session.py` as `python -I -S process_supervisor.py RUNTIME_PID STATUS_FD GATE_FD
PAGE_FD TRACED COMMAND …`; it uses nothing but the standard library. It starts the command, passes
signals on, adopts what the command leaves running and ends it, and reports through the status
pipe. When the runtime dies, it ends everything.

Status pipe: one `Report` after the start (the command's process id), one at its end (its exit
code, 128 + n when signal n ended it).
"""

import ctypes
import os
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Final, NoReturn

REPORT: Final = struct.Struct("=i")
RUNTIME_DIED: Final = signal.SIGRTMAX
KILL_COMMAND: Final = signal.SIGRTMAX - 1
"""Asks the supervisor to kill the command: it could not forward SIGKILL itself."""

POLITE_S: Final = 0.5
"""Time between SIGTERM and SIGKILL for processes that the command left behind."""

LIMIT_S: Final = 5.0
PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
FORWARDED: Final = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGTERM,
    signal.SIGTSTP, signal.SIGCONT, signal.SIGTTIN, signal.SIGTTOU, signal.SIGURG, signal.SIGXCPU, signal.SIGXFSZ,
    signal.SIGWINCH,
)  # fmt: skip
AWAITED: Final = {*FORWARDED, signal.SIGCHLD, RUNTIME_DIED, KILL_COMMAND}

_libc = ctypes.CDLL(None, use_errno=True)


def main(arguments: list[str]) -> NoReturn:
    """Run the command to its end; exits with its code."""
    runtime, status_fd, gate_fd, page_fd, traced = map(int, arguments[:5])
    command = arguments[5:]
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    _libc.prctl(PR_SET_PDEATHSIG, int(RUNTIME_DIED))
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != runtime:  # it died before it could be watched
        os._exit(128 + signal.SIGKILL)
    os.set_inheritable(status_fd, False)
    child = os.fork()
    if child == 0:
        _become(command, f"{os.getpid()}:{gate_fd}:{page_fd}:{traced}")
    for file in (gate_fd, page_fd):
        os.close(file)
    os.write(status_fd, REPORT.pack(child))
    code = _watch(child)
    os.write(status_fd, REPORT.pack(code))
    _end_descendants(POLITE_S)
    os._exit(code)


def _become(command: list[str], address: str) -> NoReturn:
    try:
        _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # Python changed these for itself
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
        os.environ["MURI_GATE"] = address
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"muri: {command[0]} could not be started: {error.strerror}\n".encode())
    os._exit(127)


def _watch(child: int) -> int:
    """Pass signals on until the command has ended; its exit code."""
    while True:
        number = signal.sigwait(AWAITED)
        if number == RUNTIME_DIED:
            os.kill(child, signal.SIGKILL)
            _end_descendants(0.0)
            os._exit(128 + signal.SIGKILL)
        elif number == signal.SIGCHLD:
            code = _reap(child)
            if code is not None:
                return code
        else:
            os.kill(child, signal.SIGKILL if number == KILL_COMMAND else number)


def _reap(child: int) -> int | None:
    """Take the exit codes of what has ended; that of the command, None while it runs."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            exited = os.waitstatus_to_exitcode(status)
            code = exited if exited >= 0 else 128 - exited


def _end_descendants(polite_s: float) -> None:
    """End what is left, children of children as they come up; gives up after `LIMIT_S`."""
    start_s = time.monotonic()
    number = signal.SIGTERM
    while (children := _children()) and time.monotonic() - start_s < LIMIT_S:
        if time.monotonic() - start_s >= polite_s:
            number = signal.SIGKILL
        for pid in children:
            os.kill(pid, number)  # not reaped yet, so it is still this very process
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
        _reap(-1)


def _children() -> list[int]:
    own = os.getpid()
    return [int(pid) for pid in Path(f"/proc/{own}/task/{own}/children").read_text().split()]


if __name__ == "__main__":
    main(sys.argv[1:])
