"""Runs a script alone under automatic stages: `python -m muri.launcher.solo [-m] SCRIPT args…`.

`muri run` starts this in place of plain Python when there is something to measure.
"""

import atexit
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from muri.launcher import automatic, script
from muri.launcher.automatic.watch import close_iterations


def main(arguments: list[str]) -> None:
    """Become the script: its sys.argv, sys.path and `__main__` are those of plain Python."""
    module = arguments[0] == "-m"
    target, *rest = arguments[1:] if module else arguments
    if not sys.flags.safe_path:
        # Python put its own first entry there for `-m muri.launcher.solo`: the working directory.
        sys.path[0] = script.own_directories(target, module, str(Path.cwd()), "")[0]
    sys.argv[:] = ["-m" if module else target, *rest]
    try:
        loaded = script.load(target, module)
    except script.ScriptError as error:
        print(f"{sys.executable}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    sys.argv[0] = loaded.argv0
    sys.modules["__main__"] = loaded.module
    if automatic.wanted(os.environ):
        automatic.install()
    _execute(loaded)


def _execute(loaded: script.LoadedScript) -> None:
    interrupted: list[bool] = []
    atexit.register(_end_by_interrupt, interrupted)  # registered first, so that it is called last
    try:
        exec(loaded.code, loaded.module.__dict__)  # noqa: S102 (running the script is the purpose)
    except SystemExit:
        raise
    except BaseException as error:
        interrupted.extend([True] * isinstance(error, KeyboardInterrupt))
        _hide_own_frames()
        raise
    finally:
        close_iterations()


def _end_by_interrupt(interrupted: list[bool]) -> None:
    """Ctrl-C that the script did not catch: end by the signal, as plain Python does."""
    if interrupted:
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _hide_own_frames() -> None:
    """Let Python's traceback begin in the script."""
    plain = sys.excepthook

    def excepthook(kind: type[BaseException], raised: BaseException, trace: Any) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in {__file__, "<frozen runpy>"}:
            trace = trace.tb_next
        if plain is sys.__excepthook__:
            traceback.print_exception(kind, raised.with_traceback(trace), trace)
        else:
            plain(kind, raised.with_traceback(trace), trace)

    sys.excepthook = excepthook


if __name__ == "__main__":
    main(sys.argv[1:])
