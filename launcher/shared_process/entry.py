"""What `muri.launcher.threads` loads: a runtime's scripts in threads of its process."""

import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from muri.group_spec import MemberSpec
from muri.launcher import threads
from muri.launcher.arbitration.arbiter import Arbiter
from muri.launcher.job.script import NAMELESS
from muri.launcher.job.session import MemberSession
from muri.launcher.job.stage_clock import IntervalListener, StageClock
from muri.launcher.protocol import ISOLATION_VARIABLE, AttachRequest
from muri.launcher.script.hooks import stages_wanted
from muri.launcher.script.script_clock import set_clock_provider
from muri.launcher.script.solo import install_stage_hooks
from muri.launcher.shared_process import gpu, isolation
from muri.launcher.shared_process.state import current_session
from muri.launcher.shared_process.thread_session import ThreadSession

logger = logging.getLogger("muri.launcher")


class Threads:
    """Runs members as threads; see `muri.launcher.threads.SharedProcess`."""

    def __init__(
        self,
        members: frozenset[str],
        preload: list[str],
        running: Callable[[], list[MemberSession]],
        end_runtime: Callable[[], None],
        *,
        takes_turns: bool,
    ) -> None:
        self._members = members
        self._preload = preload
        # sys.path of scripts: without what `python -m` puts first.
        self._base_path = list(sys.path if sys.flags.safe_path else sys.path[1:])
        gpu.preparation.expect(preload, takes_turns=takes_turns)
        gpu.watch.start(running, end_runtime)

    def install(self) -> None:
        """Let this process hold several scripts."""
        isolation.install()
        if stages_wanted(os.environ):
            install_stage_hooks()
        set_clock_provider(_clock_of_thread)
        threads.tell_scripts_apart(current_session)

    def preload(self) -> None:
        """Load what the scripts will import, and prepare the GPU."""
        for name in self._preload:
            try:
                importlib.import_module(name)
            except ImportError as error:
                logger.info("not loaded ahead: %s", error)
        gpu.preparation.prepare()

    def takes(self, request: AttachRequest) -> bool:
        """Whether a script runs as a thread: it is planned so, its user agrees, and its Python is this one."""
        wants_own = request.environment.get(ISOLATION_VARIABLE) == "process"
        # Python's options are of a whole interpreter; code without a file has nothing that a thread's modules go by.
        if request.job_id not in self._members or wants_own or request.options or request.target in NAMELESS:
            return False
        return (request.prefix, request.python) == (sys.prefix, sys.version)

    def session(
        self,
        request: AttachRequest,
        files: tuple[int, int, int],
        arbiter: Arbiter,
        on_interval: IntervalListener | None,
        spec: MemberSpec,
    ) -> MemberSession:
        """Return a session that has not started."""
        return ThreadSession(request, files, arbiter, self._base_path, on_interval, spec)

    def gpu_mem_gib(self) -> float | None:
        """Memory of the GPU that this process has prepared, None where it has none."""
        device = gpu.preparation.ready()
        return None if device is None else device.mem_gib

    def session_ended(self, session: MemberSession) -> None:
        """Look whether the GPU's context has ended with a session."""
        gpu.watch.session_ended(session)

    def fault(self) -> dict[str, Any] | None:
        """Why this process can't go on, as the status file has it; None while it can."""
        return None if gpu.watch.fault is None else gpu.watch.fault.status()


def _clock_of_thread() -> StageClock | None:
    session = current_session()
    return None if session is None else session.clock
