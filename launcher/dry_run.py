"""Stands over a dry run, so that a result is written whatever the script does."""

import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Final

from muri.launcher.measure import write_result
from muri.profiler.dryrun.request import DryRunRequest

_PR_SET_PDEATHSIG: Final = 1


def supervise(command: Sequence[str], request: DryRunRequest) -> int:
    """Run the script under measurement and see to it that there is a result.

    The script's own process measures, writes the result and ends. When it ends without having
    written one, the result says why.

    Args:
        command: The Python command line of the script.
        request: What to measure.

    Returns:
        The script's exit code, 128 + signal if one ended it.
    """
    request.result_path.unlink(missing_ok=True)
    libc = ctypes.CDLL(None)

    def die_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    with subprocess.Popen(command, preexec_fn=die_with_parent) as process:  # noqa: PLW1509 (one thread here)

        def forward(signum: int, _frame: FrameType | None) -> None:
            process.send_signal(signum)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, forward)
        code = process.wait()
    if not request.result_path.exists():
        write_result(request.result_path, {"error": _why_no_result(code)})
    sys.stdout.flush()
    return code if code >= 0 else 128 - code


def _why_no_result(code: int) -> str:
    if code < 0:
        return f"the script was ended by {signal.Signals(-code).name} before the dry run was done"
    ending = "ended" if code == 0 else f"failed with exit code {code}"
    return (
        f"the script {ending}, and no stages marked: it never called muri.stage or muri.batches, and automatic stages"
        " saw no loader, module, backward or optimizer of PyTorch (docs/automatic-stages.md)"
    )
