"""Runs a training script under measurement, as a process of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from muri.errors import MuriError, UsageError
from muri.profiler.dryrun.messages import DryRunRequest, DryRunResult, Limits
from muri.text import json_of

Progress = Mapping[str, Any]
"""What the script last reported: "iterations" and "measured" so far, "seconds" and the "confidence"."""

_DEFAULT_LIMITS: Final = Limits()
_TICK_S: Final = 0.05
_GRACE_S: Final = 5.0
_OUTPUT_TAIL_BYTES: Final = 4096
_LAST_WORDS_CHARACTERS: Final = 300

# Runs in the child before any other import, since libraries count the cores they may use when they load. The child
# must not outlive this process, which alone waits for its result (prctl 1: PR_SET_PDEATHSIG; 9: SIGKILL).
_CHILD: Final = """\
import ctypes, os
ctypes.CDLL(None).prctl(1, 9)
cpus = {cpus}
if cpus:
    os.sched_setaffinity(0, cpus)
from muri.cli import main
main()
"""


class DryRunFailedError(MuriError):
    """A dry run has no result."""


class NoScriptError(UsageError):
    """The command names no script that exists."""


def measure_script(
    command: Sequence[str],
    *,
    cpus: frozenset[int] | None = None,
    environment: Mapping[str, str] | None = None,
    limits: Limits = _DEFAULT_LIMITS,
    on_progress: Callable[[Progress], None] | None = None,
) -> DryRunResult:
    """Measure the first iterations of a script and end it then.

    May be called by several threads at once.

    Args:
        command: The script and its arguments, or "-m", a module and its arguments.
        cpus: The cores that the script and all it starts may use; None: those of this process.
        environment: The script's environment; None: that of this process.
        limits: How much it may take.
        on_progress: Called about every second with what the script reports.

    Raises:
        NoScriptError: There is no such script.
        DryRunFailedError: It failed, never iterated or took too long; the message has its last words.
    """
    check_command(command)
    with tempfile.TemporaryDirectory(prefix="muri-dry-run-") as folder:
        request = DryRunRequest(limits, Path(folder, "result.json"))
        output = Path(folder, "output")
        variables = {**(os.environ if environment is None else environment), **request.environment()}
        with output.open("wb") as stream:
            process = start(command, variables, stream, cpus=cpus)
            try:
                in_time = wait_until(process, limits.time_limit_s, _passed_on(request.progress_path, on_progress))
            finally:
                end(process)
        return _read(request, process.returncode, output, in_time=in_time)


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: BinaryIO,
    *,
    cpus: frozenset[int] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start `muri run -- command` as the leader of a session, which ends when this process does."""
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD.format(cpus=sorted(cpus or ())), "run", *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
    )


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and everything it started; it leads a session of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def last_words(output: Path) -> str:
    """The last line that a script printed, "" when it printed nothing."""
    with output.open("rb") as stream:
        stream.seek(max(0, output.stat().st_size - _OUTPUT_TAIL_BYTES))
        lines = stream.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[-_LAST_WORDS_CHARACTERS:] if lines else ""


def with_last_words(reason: str, output: Path) -> str:
    """A reason for a failure, with the last line that the script printed."""
    words = last_words(output)
    return reason + (f"\nits last words: {words}" if words else "")


def check_command(command: Sequence[str]) -> None:
    """Refuse a command that cannot be run (NoScriptError: there is no script)."""
    if not command or (command[0] == "-m" and len(command) == 1):
        raise NoScriptError("there is nothing to measure; give a script, or -m and a module")
    if command[0] != "-m" and not Path(command[0]).is_file():
        raise NoScriptError(f"there is no script {command[0]}; give its path, or -m and the name of a module")


def wait_until(process: "subprocess.Popen[bytes]", time_limit_s: float, is_over: Callable[[], bool]) -> bool:
    """Wait until a script has ended or there is no need for it any more; False when that took too long."""
    deadline_s = time.monotonic() + time_limit_s
    while process.poll() is None and not is_over():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_TICK_S)
    return True


def _passed_on(path: Path, on_progress: Callable[[Progress], None] | None) -> Callable[[], bool]:
    """Return a function that passes on what the script reports; the script, which ends by itself, is never over."""
    told = ""

    def look() -> bool:
        nonlocal told
        with contextlib.suppress(FileNotFoundError):
            if on_progress is not None and (said := path.read_text()) != told:
                told = said
                on_progress(json_of(said))
        return False

    return look


def _read(request: DryRunRequest, code: int, output: Path, *, in_time: bool) -> DryRunResult:
    try:
        value = json_of(request.result_path.read_text())
        if "error" not in value:
            return DryRunResult.from_dict(value)
        why = str(value["error"])
    except FileNotFoundError:
        why = f"the script ended with code {code} before it was measured"
    except (ValueError, KeyError) as error:
        raise DryRunFailedError(f"the dry run left an unreadable result ({error})") from error
    if not in_time:
        why = f"there was no result within {request.limits.time_limit_s:g} s"
    raise DryRunFailedError(with_last_words(f"no profile: {why}", output))
