"""Runs a script alone: `python -m muri.launcher.script.solo [-m] SCRIPT args…`; SCRIPT may be `-c CODE` or `-`.

`muri run` becomes this instead of plain Python when automatic stages measure something, for one task of several,
because gloo might spoil its exit code, and in a group. There the script's process tells the runtime how it ends.

torchrun and `accelerate launch` build a command line, `python [-u] [-m] SCRIPT args…`, for each process. It gets this
runner in front of SCRIPT, too. A command of another program stays as it is (`--no-python`).
"""

from __future__ import annotations

import atexit
import functools
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Final, NoReturn

from muri.inherited import working_directory
from muri.launcher.job import script
from muri.launcher.job.environment import AGENT_VARIABLE
from muri.launcher.job.script import after_import, is_out_of_memory, keep_process_groups
from muri.launcher.process_gate import gate_from_environment, is_gated
from muri.launcher.script.hooks import close_iterations, guarded_installation, replace, stages_wanted
from muri.launcher.script.script_clock import measures_stages
from muri.launcher.threads import watch_dangers
from muri.profiler.dryrun.messages import DRY_RUN_VARIABLE, ITERATION_LOG_VARIABLE

RUNNER: Final = ("-m", "muri.launcher.script.solo")


def under_runner(command: Sequence[str]) -> list[str]:
    """The command with Muri's runner before the script; unchanged if it runs another program than this Python."""
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


_OWN_FILES: Final = {__file__, script.__file__, runpy.__file__, "<frozen runpy>"}


def install_stage_hooks(_torch: ModuleType) -> None:
    """Mark the stages of scripts from PyTorch's import on; call once per process."""
    from muri.launcher.script import compute, data_loading, network

    guarded_installation("compute", compute.install)
    guarded_installation("workers", data_loading.install_workers)
    guarded_installation("fetching", data_loading.install_fetching)
    guarded_installation("collectives", network.install_collectives)
    guarded_installation("data_parallel", network.install_data_parallel)
    guarded_installation("torch.compile", compute.hide_from_compiler)


def wants_stages(environment: Mapping[str, str]) -> bool:
    """Whether hooks should mark stages: they are measured, or a group's runtime grants them."""
    measured = measures_stages(environment) or bool(environment.get(ITERATION_LOG_VARIABLE))
    return stages_wanted(environment) and (measured or is_gated(environment))


def main(arguments: list[str]) -> None:
    """Become the script: its sys.argv, sys.path and `__main__` are those of plain Python."""
    gate_from_environment(os.environ)  # takes its files, which nothing that the script starts must inherit
    module = arguments[0] == "-m"
    target, *rest = arguments[1:] if module else arguments
    if not getattr(sys.flags, "safe_path", False):  # since Python 3.11
        cwd = working_directory()
        # Python put it first for `-m muri.launcher.script.solo`, unless it was deleted.
        sys.path[: cwd in sys.path[:1]] = script.own_directories(target, module, cwd, "")[:1]
    sys.argv[:] = ["-m" if module else target, *rest]
    # Launchers that this process is, or becomes, start scripts under this runner; a module's package may be one.
    after_import("torch.distributed.launcher.api", _reach_ranks)
    after_import("accelerate.utils.launch", _reach_accelerate)
    try:
        loaded = _load(target, module, rest)
    except script.ScriptError as error:
        print(f"{sys.executable}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except SyntaxError:
        _hide_own_frames()
        raise
    sys.argv[0] = loaded.argv0
    sys.modules["__main__"] = loaded.module
    keep_process_groups()  # before the hooks, which hide what PyTorch has by then from the compiler
    if wants_stages(os.environ):
        after_import("torch", install_stage_hooks)
    if os.environ.get(DRY_RUN_VARIABLE) or is_gated(os.environ):
        watch_dangers(sys.path[0])
    _execute(loaded)


def _load(target: str, module: bool, rest: list[str]) -> script.LoadedScript:
    if module or target not in script.NAMELESS:
        return script.load(target, module)
    if target == "-":
        return script.load_text(sys.stdin.buffer.read(), target)
    del sys.argv[1]
    return script.load_text(rest[0], target)


class _Ending:
    """How the script ends, as far as Python decides it."""

    def __init__(self) -> None:
        self.code: int | None = None  # None where a signal ends the process
        self.interrupted = False
        self.out_of_memory = False
        self._environment = dict(os.environ)  # as it was before the script

    def interrupt(self) -> None:
        """End by SIGINT after a Ctrl-C that the script did not catch, as plain Python does."""
        if self.interrupted:
            sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)

    def tell(self) -> None:
        """Tell a group's runtime; after lack of GPU memory beside others, the job goes back to the queue instead."""
        gate = gate_from_environment(self._environment)
        if gate is None:
            return
        if self.out_of_memory and gate.had_company():
            from muri.launcher.script.checkpoint import go_back_for_memory

            go_back_for_memory(self._environment)
        if self.code is not None:
            gate.exit(self.code)

    def tell_of_plain_ends(self) -> None:
        """Tell it also where the script ends by `os._exit`, which passes over what is registered for its end."""
        plain, own = os._exit, os.getpid()

        @functools.wraps(plain)
        def _exit(status: int) -> NoReturn:
            gate = gate_from_environment(self._environment)
            if gate is not None and os.getpid() == own and isinstance(status, int):
                gate.exit(status & 0xFF)
            plain(status)

        os._exit = _exit


def _execute(loaded: script.LoadedScript) -> None:
    ending = _Ending()
    # Registered first, so that they are called last, the first one of them last of all.
    atexit.register(ending.interrupt)
    atexit.register(ending.tell)
    if is_gated(os.environ):
        ending.tell_of_plain_ends()
    script.wait_for_gloo_at_exit()
    try:
        exec(loaded.code, loaded.module.__dict__)
        ending.code = 0
    except SystemExit as error:
        ending.code = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
        raise
    except BaseException as error:
        ending.interrupted = isinstance(error, KeyboardInterrupt)
        ending.code = None if ending.interrupted else 1
        ending.out_of_memory = is_out_of_memory(error)
        _hide_own_frames()
        raise
    finally:
        close_iterations()


def _hide_own_frames() -> None:
    """Let Python's traceback begin in the script."""
    plain = sys.excepthook

    def excepthook(kind: type[BaseException], raised: BaseException, trace: Any) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
            trace = trace.tb_next
        if plain is sys.__excepthook__:
            traceback.print_exception(kind, raised.with_traceback(trace), trace)
        else:
            plain(kind, raised.with_traceback(trace), trace)

    sys.excepthook = excepthook


if __name__ == "__main__":
    main(sys.argv[1:])
