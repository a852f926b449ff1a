"""One member's script, run in a thread of the runtime as if it were a process."""

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from muri.group_spec import MemberSpec
from muri.launcher import threads
from muri.launcher.arbitration.arbiter import Arbiter
from muri.launcher.job import script
from muri.launcher.job.script import NAMELESS, after_import, is_out_of_memory
from muri.launcher.job.stage_clock import IntervalListener, StageClock
from muri.launcher.protocol import ISOLATION_VARIABLE, AttachRequest
from muri.launcher.script.checkpoint import STOP_SIGNALS, checkpointer_of
from muri.launcher.script.hooks import stages_wanted
from muri.launcher.script.script_clock import set_clock_provider
from muri.launcher.script.solo import install_stage_hooks
from muri.launcher.sessions.setup import (
    CANCEL_GRACE_S,
    HUNG_EXIT_CODE,
    MemberSession,
    call_later,
    write_notice,
)
from muri.launcher.shared_process import (
    gpu,
    interpreter,
    interruption,
    local_imports,
    random_generators,
    standard_files,
    threads_and_processes,
    torch_settings,
)
from muri.launcher.shared_process.interruption import (
    Interruption,
    SessionExit,
    SessionGate,
    SessionSignalError,
    clear_main_module,
    ending_of,
    exit_code,
    exit_with,
    print_exception,
    print_unraisable,
)
from muri.launcher.shared_process.local_imports import LocalModules
from muri.launcher.shared_process.state import (
    SessionState,
    build_state,
    current_session,
    enter_session,
    own_working_directory,
)
from muri.launcher.shared_process.threads_and_processes import begin_session, close_executors
from muri.profiler.dryrun.steadiness import LoaderAhead

logger = logging.getLogger("muri.launcher")

INSIST_S: Final = 2.0
"""Seconds between two attempts to end a script by an exception."""

_WITHOUT_EFFECT: Final = (signal.SIGCHLD, signal.SIGCONT, signal.SIGWINCH, signal.SIGURG)


class ThreadSession(MemberSession):
    """Runs one attach request; `told_to_end` says that the runtime ended the script, because it ends itself."""

    isolation = "thread"

    def __init__(
        self,
        request: AttachRequest,
        files: tuple[int, int, int],
        arbiter: Arbiter,
        base_path: list[str],
        on_interval: IntervalListener | None = None,
        spec: MemberSpec | None = None,
    ) -> None:
        super().__init__(request, arbiter, spec)
        self.told_to_end = False
        self._state = build_state(request, files, base_path)
        self._state.leave = self.leave
        self._state.refuse = self.refuse
        # Not a daemon: the script's own threads inherit that, and a script waits for its threads.
        self._thread = threading.Thread(target=self._main, name=f"member-{self.member}", daemon=False)
        self._interruption = Interruption(self._state, arbiter, self._thread)
        self._state.hold_back, self._state.let_through = self._interruption.hold_back, self._interruption.let_through
        self.ended = self._interruption.ended
        self.clock = self._state.clock = StageClock(SessionGate(self._interruption, arbiter), on_interval)
        self._ahead = LoaderAhead()
        self.clock.on_prefetch_depth = self._works_ahead
        self.clock.explicit = not stages_wanted(request.environment)

    def start(self, on_end: Callable[[MemberSession], None]) -> None:
        """Run the script; `on_end` is called once, when the exit code is known."""
        self._on_end = on_end
        self.join_arbiter()
        self._thread.start()

    def deliver(self, signum: int) -> None:
        """Do what the signal would do to a process that runs the script."""
        if signum in {*_WITHOUT_EFFECT, *self.request.blocked, *self.request.ignored} or self._asked_to_stop(signum):
            return
        self.end(signum)

    def _asked_to_stop(self, signum: int) -> bool:
        """Deliver a signal to the script's checkpointer; return whether it has one."""
        checkpointer = checkpointer_of(self._state)
        if checkpointer is None or signum not in STOP_SIGNALS:
            return False
        checkpointer.stop_asked = True
        return True

    def end(self, signum: int, grace_s: float = CANCEL_GRACE_S) -> None:
        """End the script with a signal's default action, and insist on it from another thread."""
        threading.Thread(target=self._insist, args=(ending_of(signum), 128 + signum, grace_s), daemon=True).start()

    def leave(self, code: int) -> None:
        """End the script at once, for `os._exit` in any of its threads."""
        if self._interruption.in_own_thread:
            raise SessionExit(code)
        threading.Thread(target=self._insist, args=(exit_with(code), code), daemon=True).start()
        raise SystemExit  # ends this thread without a report

    def refuse(self, danger: str) -> None:
        """Give the script up before it does what is not safe in a thread; its exit code means nothing then."""
        with self._verdict:
            self.lost_cause = self.lost_cause or danger
        logger.warning("member %s: %s", self.member, danger)
        code = 128 + signal.SIGTERM
        call_later(INSIST_S, self._insist, exit_with(code), code)  # the script may catch what is raised here
        self.leave(code)

    def tell(self, text: str) -> None:
        """Write a line to the script's standard error."""
        with self._verdict:
            if not self.ended.is_set():  # then its files are open
                write_notice(os.dup(self._state.files[2]), text)

    def facts(self) -> Mapping[str, Any] | None:
        """Return the runtime's knowledge of its own thread; any danger would have ended the session."""
        return {
            "gpu_mem_gib": self.clock.gpu.gpu_mem_peak_gib,
            "dangers": [],
            "depth": self._ahead.depth,
            "period": self._ahead.period,
        }

    def _works_ahead(self, depth: int, period: int) -> None:
        self._ahead = self._ahead.widened(LoaderAhead(depth, period))

    def working_threads(self) -> list[Path]:
        """The session's threads."""
        threads = [self._thread, *self._state.threads]
        return [Path(f"/proc/self/task/{one.native_id}") for one in threads if one.native_id and one.is_alive()]

    def shut_down(self, grace_s: float) -> None:
        """The runtime ends: let the script save itself, or end it."""
        with self._verdict:
            if self.ended.is_set():
                return
            self.told_to_end = True
        if self._asked_to_stop(signal.SIGTERM):
            call_later(grace_s * 0.8, self.end, signal.SIGTERM, grace_s * 0.2)
        else:
            self.end(signal.SIGTERM, grace_s)

    @property
    def checkpointed(self) -> bool:
        """Whether the script has told how to save it."""
        return checkpointer_of(self._state) is not None

    @property
    def lost(self) -> bool:
        """Whether its exit code means nothing: the runtime's end cut the script short, or it cannot run in a thread."""
        cut_short = self.told_to_end and self.exit_code == 128 + signal.SIGTERM
        return self.condemned or self.lost_cause is not None or cut_short

    def detach_output(self) -> None:
        """The member's process is gone: what the script still writes goes nowhere."""
        null = os.open(os.devnull, os.O_RDWR)
        with contextlib.suppress(OSError, ValueError):
            for stream in self._state.streams.values():
                os.dup2(null, stream.fileno(), inheritable=False)
            for file in self._state.files:
                os.dup2(null, file, inheritable=False)
        os.close(null)

    def _insist(self, kind: type[BaseException], code: int, grace_s: float = CANCEL_GRACE_S) -> None:
        waited_s, self._ending_class = 0.0, kind
        while not self.ended.is_set() and waited_s < grace_s:
            self._interruption.throw(self._ending_class)  # the latest: another signal may have come
            step_s = INSIST_S if waited_s else 0.2
            self.ended.wait(step_s)
            waited_s += step_s
        if not self.ended.is_set():
            logger.warning("member %s did not end within %g s and was given up", self.member, grace_s)
            self._conclude(code)

    def _main(self) -> None:
        begin_session(self._state)
        code = 1
        try:
            code = self._run_script()
        except BaseException:  # an exception from outside that came late
            code = 128 + signal.SIGTERM
        finally:
            self._finish(code)

    def _run_script(self) -> int:
        try:
            own_working_directory(self.request, self._state)
            gpu.enter_session(self._state)
            loaded = script.load(self.request.target, self.request.module)
            self._state.main = loaded.module
            self._state.argv[0] = loaded.argv0
            exec(loaded.code, loaded.module.__dict__)
            code = 0
        except BaseException as error:  # every way in which a script can end
            code = self._code_of(error)
            if isinstance(error, SessionExit):
                return code
        self._interruption.allowed = self._interruption.pending is None and code < 128
        close_executors(self._state)
        for thread in self._state.threads:
            while thread.is_alive() and not thread.daemon and not self._state.interrupted.is_set():
                thread.join(timeout=0.5)
        try:
            self._run_exit_functions()
        except SessionExit as error:
            return exit_code(error, self._state)
        return code

    def _code_of(self, error: BaseException) -> int:
        self.fault = gpu.sticky_text(error, gpu.preparation.device)
        # A script that caught the error and chose its exit code has dealt with it.
        self.out_of_memory = not isinstance(error, SystemExit) and is_out_of_memory(error)
        if isinstance(error, SystemExit):
            return exit_code(error, self._state)
        if isinstance(error, script.ScriptError):
            print(f"{sys.executable}: {error}", file=self._state.streams["stderr"])
            return error.exit_code
        print_exception(error, self._state)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1

    def _run_exit_functions(self) -> None:
        functions = self._state.exit_functions
        while functions:
            function = functions.pop()
            try:
                function()
            except (SessionSignalError, SessionExit):
                raise
            except BaseException as error:  # sys.exit, too, ends only the function
                print_unraisable(error, function, self._state)

    def _finish(self, code: int) -> None:
        self._interruption.forbid()
        self._arbiter.leave(self.member)
        failure = self._clean_up()
        self._conclude(code)
        for file in self._state.files:
            with contextlib.suppress(OSError):
                os.close(file)
        enter_session(None)
        if failure is not None:
            logger.error("member %s: cleaning up after its script failed", self.member, exc_info=failure)
        gpu.give_memory_back(self.clock)

    def _clean_up(self) -> BaseException | None:
        """Drop all that the script has left; a failure is returned, because the member's process waits for the end."""
        try:
            with contextlib.ExitStack() as then:  # calls all of them, the last one first, whatever the others raise
                then.callback(forget, self._state)
                then.callback(self._close_streams)
                then.callback(clear_main_module, self._state.main)
                if (checkpointer := checkpointer_of(self._state)) is not None:
                    self.stopped_at = checkpointer.stopped_at
                    checkpointer.close()
        except BaseException as error:
            return error
        return None

    def _close_streams(self) -> None:
        for stream in self._state.streams.values():
            with contextlib.suppress(Exception):
                stream.close()

    def _conclude(self, code: int) -> None:
        """Report the end, once."""
        with self._interruption.lock, self._verdict:
            if self.ended.is_set():
                return
            self.exit_code = HUNG_EXIT_CODE if self.hung and code > 128 else code
            self.ended.set()
        self._arbiter.leave(self.member)
        self._on_end(self)


class Threads:
    """Runs members as threads of this process.

    `members` are the job ids that are planned so, `preload` modules to load ahead. `running` tells the sessions under
    way, of either kind; `end_runtime` ends this process, because its GPU context has ended. If it `takes_turns`,
    members' kernels must not overlap.
    """

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
        gpu.preparation.expect(takes_turns=takes_turns)
        self.faults = gpu.FaultWatch(running, end_runtime)

    def install(self) -> None:
        """Let this process hold several scripts; call it from the main thread, before any session starts."""
        standard_files.install_streams()
        interpreter.install_interpreter()
        threads_and_processes.install_threads()
        # Libraries: each is patched when a script imports it.
        random_generators.install_python_random()
        after_import("numpy.random", random_generators.patch_numpy)
        after_import("torch", random_generators.patch_torch)
        after_import("torch", torch_settings.patch_thread_counts)
        after_import("torch", torch_settings.patch_print_options)
        after_import("torch", threads_and_processes.patch_autograd)
        standard_files.install_file_numbers()
        threads_and_processes.at_session_start(standard_files.install_c_output().begin)
        # The patches below must tell a script's own modules from installed ones.
        modules = local_imports.install_local_modules()
        after_import("torch", local_imports.use_once)
        local_imports.install_import_turns(modules)
        interruption.install_exits(modules)
        interpreter.install_logging(modules)
        interpreter.install_warnings()
        interpreter.install_settings()
        threads_and_processes.install_dangers()
        _installed.append(modules)
        if stages_wanted(os.environ):
            after_import("torch", install_stage_hooks)
        set_clock_provider(lambda: getattr(current_session(), "clock", None))
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
    ) -> ThreadSession:
        """Return a session that has not started."""
        return ThreadSession(request, files, arbiter, self._base_path, on_interval, spec)

    def gpu_mem_gib(self) -> float | None:
        """Memory of the GPU that this process has prepared, None where it has none."""
        device = gpu.preparation.ready()
        return None if device is None else device.mem_gib


_installed: list[LocalModules] = []


def forget(session: SessionState) -> None:
    """Drop everything that an ended session still holds: its own modules, and the rest."""
    torch_settings.drop_modes()
    for modules in _installed:
        modules.forget(session)
    session.belongings.clear()
