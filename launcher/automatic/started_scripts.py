"""Scripts that a launcher starts in processes of their own are measured there: torchrun, `accelerate launch`.

Both build a command line, `python [-u] [-m] SCRIPT args…`, for each process. It gets Muri's runner in front of SCRIPT,
which is what `muri run` does for a script alone. A command that is none of Python stays as it is (`--no-python`).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

from muri.launcher.automatic.watch import replace
from muri.launcher.job.environment import AGENT_VARIABLE
from muri.launcher.job.import_hooks import after_import

RUNNER: Final = ("-m", "muri.launcher.run.solo")


def install_in_launchers() -> None:
    """Let launchers that this process is, or becomes, start scripts under Muri's runner."""
    after_import("torch.distributed.launcher.api", _reach_ranks)
    after_import("accelerate.utils.launch", _reach_accelerate)


def under_runner(command: Sequence[str]) -> list[str]:
    """The command with Muri's runner before the script; unchanged if it is none of this Python."""
    python, *arguments = command
    flags = 1 if arguments[:1] == ["-u"] else 0
    target = arguments[flags:]
    script = target[1:] if target[:1] == ["-m"] else target
    if python != sys.executable or not script or script[0].startswith("-"):
        return list(command)
    return [python, *arguments[:flags], *RUNNER, *target]


def _reach_ranks(api: ModuleType) -> None:
    plain = getattr(api, "launch_agent", None)
    if plain is None:  # another version of PyTorch: its ranks are not measured
        return

    @functools.wraps(plain)
    def launch_agent(config: Any, entrypoint: Any, args: list[Any], *more: Any, **named: Any) -> Any:
        if isinstance(entrypoint, str) and all(isinstance(argument, str) for argument in args):
            os.environ[AGENT_VARIABLE] = str(os.getpid())
            _, *args = under_runner([entrypoint, *args])
        return plain(config, entrypoint, args, *more, **named)

    replace(api, "launch_agent", launch_agent)


def _reach_accelerate(launch: ModuleType) -> None:
    plain = getattr(launch, "prepare_simple_launcher_cmd_env", None)
    if plain is None:
        return

    @functools.wraps(plain)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        command, environment = plain(*args, **kwargs)
        return under_runner(command), environment

    replace(launch, "prepare_simple_launcher_cmd_env", prepare)
