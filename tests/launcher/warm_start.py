"""Python processes that have PyTorch loaded when they start: its import costs seconds, which no test is about.

`WarmStart.popen` looks like `subprocess.Popen`. Its processes are forked from a server, this file run as a script,
which has imported PyTorch and nothing of Muri's launcher. A forked process interprets its command line as
Python would (`-c`, `-m` or a script), and an `os.execv` of Python, as `muri run` does it, goes on in the same process.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
LOADED = (
    "torch", "torch._dynamo", "numpy", "psutil", "multiprocessing.spawn", "torch.nn.parallel.distributed",
    "torch.utils.data.distributed", "muri.cli", "muri.group_spec", "muri.profiler.dryrun.steadiness",
    "muri.profiler.usage",
)  # fmt: skip
_LARGEST_MESSAGE = 1 << 17
_START_S = 240.0


class WarmProcess:
    """A forked process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, server: "WarmStart", pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the server has seen its end, but not told of it yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class WarmStart:
    """The server, as the test process sees it; it ends with that process."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                                        stdin=subprocess.DEVNULL, env=os.environ | ONE_THREAD)  # fmt: skip
        theirs.close()
        self._ended: dict[int, int] = {}
        self._started: list[int] = []

    def popen(self, command: Sequence[str], *, env: dict[str, str], stdout: IO[bytes] | None = None,
              stderr: IO[bytes] | None = None, cwd: Path | None = None) -> WarmProcess:  # fmt: skip
        """Start a process; `command[0]` must be this Python."""
        assert command[0] == sys.executable
        request = {"arguments": list(map(str, command[1:])), "env": env, "cwd": str(cwd or Path.cwd())}
        with Path(os.devnull).open() as nothing:
            files = [nothing.fileno(), stdout.fileno() if stdout else 1, stderr.fileno() if stderr else 2]
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
        while not self._started:
            assert self._receive(_START_S), "the server that has PyTorch loaded does not answer"
        return WarmProcess(self, self._started.pop())

    def exit_code(self, pid: int, timeout_s: float | None) -> int | None:
        """The exit code of a process, None if it has not ended in time."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while pid not in self._ended:
            if not self._receive(None if end_s is None else max(0.0, end_s - time.monotonic())):
                return None
        return self._ended[pid]

    def _receive(self, timeout_s: float | None) -> bool:
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return False
        text = self._socket.recv(_LARGEST_MESSAGE)
        assert text, f"the server that has PyTorch loaded has ended with {self._server.wait(_START_S)}"
        message = json.loads(text)
        if "started" in message:
            self._started.append(message["started"])
            self._ended.pop(message["started"], None)  # pids come again
        else:
            self._ended[message["ended"]] = message["code"]
        return True


@functools.cache
def warm_start() -> WarmStart:
    """The server of this test process."""
    return WarmStart()


def starts_warm(environment: dict[str, str]) -> bool:
    """Whether a forked process can heed an environment: it does not start Python anew."""
    own = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
    wanted = {name: value for name, value in environment.items() if name.startswith("PYTHON")}
    return wanted.items() - own.items() <= {("PYTHONFAULTHANDLER", "1"), ("PYTHONWARNINGS", "ignore")}


class _Executed(BaseException):
    """`os.execv` of Python."""

    def __init__(self, arguments: list[str]) -> None:
        super().__init__()
        self.arguments = arguments


_plain_execv = os.execv


def _execv(path: str, command: Sequence[str]) -> NoReturn:
    if path == sys.executable:
        raise _Executed(list(command[1:]))
    _plain_execv(path, command)


def _interpret(arguments: list[str]) -> None:
    """Do what Python does with a command line of `-c CODE`, `-m MODULE` or a script, and arguments."""
    first, *rest = arguments
    main = types.ModuleType("__main__")
    if first == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path[0] = str(Path.cwd())
        runpy._run_module_as_main(rest[0])  # what `python -m` itself calls
        return
    if first == "-c":
        code: Any = compile(rest[0], "<string>", "exec")
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
    else:
        code = compile(Path(first).read_bytes(), first, "exec")
        sys.argv, sys.path[0] = [first, *rest], str(Path(first).resolve().parent)
        main.__file__ = str(Path.cwd() / first)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _become(arguments: list[str]) -> None:
    os.execv = _execv
    while True:
        try:
            return _interpret(arguments)
        except _Executed as executed:
            arguments = executed.arguments


def _become_and_exit(arguments: list[str]) -> NoReturn:
    """End as Python does, but leave PyTorch's modules to the kernel: freeing them costs as much as importing them."""
    code: object = None
    try:
        _become(arguments)
    except SystemExit as ending:
        code = ending.code
        if not (code is None or isinstance(code, int)):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next  # Python's own start has no frames
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code or 0) & 0xFF)


def _import_ahead() -> None:
    del sys.path[0]  # this file's folder
    for name in LOADED:
        importlib.import_module(name)
    sys.path.insert(0, "")
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork takes along one thread only"
    gc.collect()
    gc.freeze()  # what all processes share, their collectors need not look at


def _serve(connection: socket.socket) -> list[str]:
    """Fork a process for every request; returns its command line in the forked one, never here."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: set[int] = set()
    while True:
        ready = select.select([connection, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            for pid in [pid for pid in running if _has_ended(connection, pid)]:
                running.discard(pid)
        if connection in ready:
            text, files, _, _ = socket.recv_fds(connection, _LARGEST_MESSAGE, 3)
            if not text:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            request = json.loads(text)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (woken, wake):
                    os.close(descriptor)
                connection.close()
                return _settle(request, files)
            for descriptor in files:
                os.close(descriptor)
            running.add(pid)
            connection.send(json.dumps({"started": pid}).encode())


def _has_ended(connection: socket.socket, pid: int) -> bool:
    found, status = os.waitpid(pid, os.WNOHANG)
    if found:
        connection.send(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())
    return bool(found)


def _settle(request: dict[str, Any], files: list[int]) -> list[str]:
    """Take over files, directory and environment."""
    for target, source in enumerate(files):
        os.dup2(source, target)
        os.close(source)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    return list(request["arguments"])


if __name__ == "__main__":
    _import_ahead()
    _become_and_exit(_serve(socket.socket(fileno=int(sys.argv[1]))))
