"""Stands between the runtime and a member's process, so that neither leaves anything behind.

Started by `process_start.py` as `python -I -S inherited.py process_supervisor.py SOCKET`, as the runtime's child or as
a Slurm step; it uses nothing but the standard library. It connects to the runtime, gets the command with all that
belongs to it and starts it, passes signals on, adopts what the command leaves running and ends it, and reports. When
the connection breaks, it ends everything: the runtime is gone.

To the runtime go a `HELLO`, a `STARTED` and an `ENDED`. From it come a `LENGTH` with the open files beside it, as many
bytes of JSON, and then a `SIGNAL` for every signal to pass on.
"""

import array
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any, Final, NoReturn

HELLO: Final = struct.Struct("=i")
"""The supervisor's process id. It differs from that of a process that only looks for a listener."""

LENGTH: Final = struct.Struct("=I")
FILE_COUNT: Final = 5
"""Standard input, output and error, the gate's socket, the shared page."""

STARTED: Final = struct.Struct("=i")
"""The command's process id."""

ENDED: Final = struct.Struct("=i?")
"""Its exit code, 128 + n when signal n ended it; whether another than the runtime has told it to end."""

SIGNAL: Final = struct.Struct("=i")

POLITE_S: Final = 0.5
"""Time between SIGTERM and SIGKILL for processes that the command left behind."""

OTHERS_PAUSE_S: Final = 0.5
"""How long the end is held back if the runtime has not caused it: Slurm may be ending runtime and command alike, and
then the runtime's own end decides what the command's exit code means."""

LIMIT_S: Final = 5.0
PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
_CREDENTIALS: Final = struct.Struct("3i")
_DEADLY: Final = {128 + signal.SIGTERM, 128 + signal.SIGKILL}

WITHSTOOD: Final = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGTERM,
    signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGXCPU,
)  # fmt: skip
"""Signals that Slurm, or a user, sends to all of a step. The command has its own; the supervisor outlives it."""

_libc = ctypes.CDLL(None, use_errno=True)


class _RuntimeGoneError(Exception):
    """The connection to the runtime broke."""


class _Runtime:
    """The connection to the runtime."""

    def __init__(self, address: str) -> None:
        self.socket: Final = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(address)
        raw = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(raw)[1] != os.geteuid():
            raise PermissionError(f"{address} belongs to another user")
        self.tell(HELLO.pack(os.getpid()))

    def tell(self, message: bytes) -> None:
        try:
            self.socket.sendall(message)
        except OSError as error:
            raise _RuntimeGoneError from error

    def signal(self) -> int:
        """The signal to pass on."""
        return int(SIGNAL.unpack(self._exactly(SIGNAL.size))[0])

    def command(self) -> tuple[dict[str, Any], list[int]]:
        """What to start, and its files."""
        space = socket.CMSG_SPACE(FILE_COUNT * array.array("i").itemsize)
        start, ancillary, _, _ = self.socket.recvmsg(LENGTH.size, space, socket.MSG_CMSG_CLOEXEC)
        files = array.array("i")
        for _, _, data in ancillary:
            files.frombytes(data)
        if len(start) != LENGTH.size or len(files) != FILE_COUNT:
            raise _RuntimeGoneError
        return json.loads(self._exactly(*LENGTH.unpack(start))), list(files)  # noqa: TID251 (the runtime wrote it)

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self.socket.recv(count - len(parts))
            except OSError as error:
                raise _RuntimeGoneError from error
            if not part:
                raise _RuntimeGoneError
            parts += part
        return bytes(parts)


class _Command:
    """The running command.

    Attributes:
        pid: Its process id.
    """

    def __init__(self, pid: int, woken: int) -> None:
        self.pid: Final = pid
        self._woken = woken
        self._passed_on: set[int] = set()
        self._told_by_others = False

    def watch(self, runtime: _Runtime) -> int:
        """Pass signals on until the command has ended, and report that; its exit code."""
        code = None
        while code is None:
            ready = select.select([runtime.socket.fileno(), self._woken], [], [])[0]
            if self._woken in ready:
                self._told_by_others |= signal.SIGTERM in os.read(self._woken, 4096)
                code = _reap(self.pid)
            else:
                number = runtime.signal()
                self._passed_on.add(number)
                os.kill(self.pid, number)  # not reaped yet, so it is still this very process
        if self._told_by_others or (code in _DEADLY and code - 128 not in self._passed_on):
            time.sleep(OTHERS_PAUSE_S)
        runtime.tell(ENDED.pack(code, self._told_by_others))
        return code


def main(address: str) -> NoReturn:
    """Run the command that the runtime at a socket names; ends as it does."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (*WITHSTOOD, signal.SIGCHLD):
        signal.signal(number, lambda _number, _frame: None)  # children would inherit SIG_IGN
    os.chdir("/")
    try:
        runtime = _Runtime(address)
        wanted, files = runtime.command()
        command = _Command(_start(wanted, files), woken)
        runtime.tell(STARTED.pack(command.pid))
        code = command.watch(runtime)
    except _RuntimeGoneError:
        _end_descendants(0.0)
        os._exit(128 + signal.SIGKILL)
    _end_descendants(POLITE_S)
    _end_as(code)


def _start(wanted: dict[str, Any], files: list[int]) -> int:
    """Start the command in a session of its own; its process id."""
    *standard, gate, page = files
    for target, source in enumerate(standard):
        os.dup2(source, target)
        os.close(source)
    # Nothing runs on a signal in the child before it has become the command.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    child = os.fork()
    if child == 0:
        _become(wanted, gate, page)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for file in (gate, page):
        os.close(file)
    return child


def _become(wanted: dict[str, Any], gate: int, page: int) -> NoReturn:
    command = wanted["command"]
    try:
        _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        os.setsid()
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:  # Python and `main` have changed some
            signal.signal(number, signal.SIG_IGN if number in wanted.get("ignored", ()) else signal.SIG_DFL)
        for file in (gate, page):
            os.set_inheritable(file, True)
        os.umask(wanted["umask"])
        os.chdir(wanted["cwd"])
        _limit_as(wanted)
        own = {name: os.environ[name] for name in wanted["own_variables"] if name in os.environ}
        address = f"{os.getpid()}:{gate}:{page}:{int(wanted['traced'])}"
        environment = {**wanted["environment"], **own, "MURI_GATE": address}
        signal.pthread_sigmask(signal.SIG_SETMASK, wanted.get("blocked", ()))
        os.execve(command[0], command, environment)
    except OSError as error:
        os.write(2, f"muri: {error.filename or command[0]} could not be started: {error.strerror}\n".encode())
    os._exit(127)


def _limit_as(wanted: dict[str, Any]) -> None:
    """Take the niceness and the resource limits that are wanted; say on standard error which cannot be had."""
    missed = _renice(wanted.get("nice"))  # first: a limit of the niceness itself could forbid it
    for name, (soft, hard) in wanted.get("limits", {}).items():
        missed += _limit(name, soft, hard)
    if missed:
        with contextlib.suppress(OSError):  # its reader may be gone, its file as large as it may be
            os.write(2, f"muri: unlike in the job's own batch script, {', '.join(missed)}\n".encode())
        signal.sigtimedwait((signal.SIGPIPE, signal.SIGXFSZ), 0)  # blocked here, it would end the command instead


def _renice(nice: int | None) -> list[str]:
    """Take a niceness; what to say if that is not permitted."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    if nice is None or nice == own:
        return []
    try:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    except PermissionError:
        return [f"niceness is {own}, not {nice}"]
    return []


def _limit(name: str, soft: int, hard: int) -> list[str]:
    """Set a resource limit as far as this process may: only privileged ones raise a hard one; what to say if not."""
    number = getattr(resource, name, None)
    if not name.startswith("RLIMIT_") or number is None:
        return []  # a later Python's
    own = resource.getrlimit(number)
    wanted, nearest = (soft, hard), (_lower(soft, own[1]), _lower(hard, own[1]))
    if own == wanted or _set(number, wanted):
        return []
    got = nearest if _set(number, nearest) else own
    if got[0] == soft:
        return []  # a hard limit alone changes nothing, until a script raises its soft one
    return [f"{name} is {_spoken(got)}, not {_spoken(wanted)}"]


def _set(number: int, limits: tuple[int, int]) -> bool:
    try:
        resource.setrlimit(number, limits)
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _lower(one: int, other: int) -> int:
    return min((one, other), key=lambda limit: float("inf") if limit == resource.RLIM_INFINITY else limit)


def _spoken(limits: tuple[int, int]) -> str:
    soft, hard = ("unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in limits)
    return f"{soft} (hard {hard})"


def _end_as(code: int) -> NoReturn:
    """End with the command's exit code, or by the signal that ended it: Slurm records that of the step."""
    if code > 128:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has left a core file if it may
        with contextlib.suppress(OSError, ValueError):  # the code may be the command's own, and no signal
            signal.signal(code - 128, signal.SIG_DFL)
            os.kill(os.getpid(), code - 128)
    os._exit(code)


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
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    start_s = time.monotonic()
    number = signal.SIGTERM if polite_s else signal.SIGKILL
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
    try:
        main(sys.argv[1])
    except (FileNotFoundError, ConnectionRefusedError):
        os._exit(1)  # the runtime waits no longer
