"""How a script ends: exit codes, signals, the traceback that it leaves, and the notice to one that hangs."""

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Callable
from functools import partial
from types import ModuleType, TracebackType
from typing import Any, Final, NoReturn

from muri.launcher.isolation import local_imports
from muri.launcher.isolation.interpreter import own_excepthook
from muri.launcher.isolation.signals_and_exits import SessionExit
from muri.launcher.job import script
from muri.launcher.job.session import SessionState

HUNG_EXIT_CODE: Final = 124
"""Exit code of a script that was ended because it hung; timeout(1) uses the same."""

HUNG_GRACE_S: Final = 2.0
"""After this time a hanging script is abandoned, or its process killed: it rarely ends by itself."""


class SessionSignalError(SystemExit):
    """A signal ends the script; the exit code is that of the shell, 128 + signal."""

    signum = 0

    def __init__(self) -> None:
        super().__init__(128 + self.signum)


def ending_of(signum: int) -> type[BaseException]:
    """Raised in the script by a signal without a handler."""
    if signum == signal.SIGINT:
        return KeyboardInterrupt
    return type(f"Ended_{signal.Signals(signum).name}", (SessionSignalError,), {"signum": signum})


def exit_with(code: int) -> type[SystemExit]:
    """What ends a script at once from another thread: raised without arguments."""

    class Left(SessionExit):
        def __init__(self) -> None:
            super().__init__(code)

    return Left


def clear_main_module(main: ModuleType) -> None:
    """Release what a script holds at its end, the newest first: an object may need older ones to finish."""
    names = main.__dict__
    for _ in range(len(names)):
        if names:
            names.popitem()
    names.clear()


def exit_code(error: SystemExit, state: SessionState) -> int:
    """The exit code that Python derives from the exception; prints its message if it has one."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=state.streams["stderr"])
    return 1


def _without_launcher(frames: TracebackType | None, session_file: str) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename in {session_file, script.__file__}:
        frames = frames.tb_next
    return frames


def leave_process(code: int, state: SessionState) -> NoReturn:
    """End a process that a script has forked, as Python would: its own thread is the process's last."""
    for stream in state.streams.values():
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def print_unraisable(
    error: BaseException, function: Callable[..., object], state: SessionState, session_file: str
) -> None:
    """Print what a function given to `atexit` raised, as Python does."""
    plain = function.func if isinstance(function, partial) else function
    with contextlib.suppress(OSError, ValueError):
        print(f"Exception ignored in atexit callback: {plain!r}", file=state.streams["stderr"])
        frames = _without_launcher(error.__traceback__, session_file)
        traceback.print_exception(type(error), error, frames, file=state.streams["stderr"])


def print_exception(error: BaseException, state: SessionState, session_file: str) -> None:
    """Print a traceback without frames of the launcher, as Python's own would be, or call the script's hook."""
    hook = own_excepthook()
    if hook is not None:
        try:
            hook(type(error), error, _without_launcher(error.__traceback__, session_file))
        except Exception as failure:
            print("Error in sys.excepthook:", file=state.streams["stderr"])
            traceback.print_exception(failure, file=state.streams["stderr"])
        else:
            return
    report: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    text = report
    while report is not None:
        kept = [f for f in report.stack if f.filename not in {session_file, script.__file__, local_imports.__file__}]
        report.stack = traceback.StackSummary.from_list(kept)
        report = report.__cause__ or report.__context__
    with contextlib.suppress(OSError, ValueError):
        for part in text.format() if text is not None else ():
            print(part, file=state.streams["stderr"], end="")


def tell_hang(file: int, cause: str) -> None:
    """Write the cause to a member's standard error, from a thread: what hangs may be the reader of that file."""
    copy = os.dup(file)

    def write() -> None:
        with contextlib.suppress(OSError), os.fdopen(copy, "w") as stream:
            stream.write(f"muri: {cause}\n")

    threading.Thread(target=write, name="notice", daemon=True).start()


def reported_code(code: int, *, hung: bool) -> int:
    """The exit code to report for a script: its own, unless it was ended for hanging."""
    return HUNG_EXIT_CODE if hung and code > 128 else code


def call_later(delay_s: float, function: Callable[..., object], *arguments: Any) -> None:
    """Call a function after some seconds, in a thread of its own that does not keep the process alive."""
    timer = threading.Timer(delay_s, function, arguments)
    timer.daemon = True
    timer.start()
