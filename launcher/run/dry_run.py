"""Supervises a dry run: samples what the script uses, and makes sure that a result exists."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from muri.files import PRIVATE_FILE, atomic_json
from muri.foreign import json_of
from muri.inherited import give_back
from muri.launcher.job.environment import task_of
from muri.profiler.dryrun.messages import DryRunRequest
from muri.profiler.dryrun.summary import with_usage
from muri.profiler.resource_usage.sample import Usage
from muri.profiler.resource_usage.sampler import Sampler
from muri.pythons import ScriptPython

_PR_SET_PDEATHSIG: Final = 1


def supervise(command: Sequence[str], request: DryRunRequest, python: ScriptPython) -> int:
    """Run the script under measurement and make sure that a result exists.

    The script's own process measures, writes its result and ends. This process adds what the script and its
    processes used meanwhile. When the script ends without a result, this process writes one that says why.

    Args:
        command: The Python command line of the script.
        request: What to measure.
        python: The script's, which the result names.

    Returns:
        The script's exit code, 128 + signal if one ended it.
    """
    if task_of(os.environ)[0] != 0:  # the first of several ranks measures and answers for all
        with _started(command, {}) as process:
            return _exit_code(process.wait())
    found = request.for_script()
    for path in (request.result_path, found.result_path, request.progress_path):
        path.unlink(missing_ok=True)
    with _started(command, found.environment()) as process, Sampler(process.pid) as sampler:
        code = process.wait()
        usage = sampler.stop()
    request.progress_path.unlink(missing_ok=True)
    result = _completed(_take(found.result_path), code, usage)
    found_python = {"executable": python.executable, "prefix": python.prefix}
    atomic_json(request.result_path, result | {"python": found_python}, PRIVATE_FILE)
    return _exit_code(code)


def _completed(found: dict[str, Any] | None, code: int, usage: Usage) -> dict[str, Any]:
    if found is None:
        return {"error": _why_no_result(code)}
    if "error" in found and code > 0:
        return {"error": f"the script failed with exit code {code}: {found['error']}"}
    return with_usage(found, usage)


@contextlib.contextmanager
def _started(command: Sequence[str], variables: Mapping[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the script's process; it receives the signals that would end this one, and does not outlive this one."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with this process
        give_back()

    environment = {**os.environ, **variables}
    with subprocess.Popen(command, preexec_fn=prepare, env=environment) as process:  # noqa: PLW1509 (one thread)

        def forward(signum: int, _frame: FrameType | None) -> None:
            process.send_signal(signum)

        signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for number in signals:
            signal.signal(number, forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        yield process


def _take(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json_of(path.read_text()))
    except FileNotFoundError:
        return None
    finally:
        path.unlink(missing_ok=True)


def _exit_code(code: int) -> int:
    sys.stdout.flush()
    return code if code >= 0 else 128 - code


def _why_no_result(code: int) -> str:
    if code < 0:
        return f"the script was ended by {signal.Signals(-code).name} before the dry run was done"
    ending = "ended" if code == 0 else f"failed with exit code {code}"
    return (
        f"the script {ending}, no stages marked: it never called muri.stage or muri.batches, and automatic stages"
        " saw no loader, module, backward or optimizer of PyTorch (docs/scripts.md)"
    )
