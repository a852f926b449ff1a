"""The process that a group shares: `python -m muri.launcher.runtime --members 101,102 …`."""

import importlib
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click

from muri.cli import run_command
from muri.errors import UsageError
from muri.launcher import automatic, isolation
from muri.launcher.arbitration.arbiter import Arbiter
from muri.launcher.arbitration.switching import DISCIPLINES, make_arbiter
from muri.launcher.automatic.watch import stages_wanted
from muri.launcher.hangs.watch import HangWatch
from muri.launcher.hangs.watchdog import Guard
from muri.launcher.job.environment import HANG_TIMEOUT_S
from muri.launcher.job.session import current_session
from muri.launcher.job.stage_clock import StageClock
from muri.launcher.ranks.link import Place
from muri.launcher.runtime.admission import AdmissionControl, MemoryAdmission
from muri.launcher.runtime.member_table import MemberTable
from muri.launcher.runtime.rank_group import RankGroup, rank_options, take_place
from muri.launcher.runtime.server import Server, SessionFactory
from muri.launcher.sessions import gpu_errors, gpu_streams
from muri.launcher.sessions.setup import take_short_turns, wait_without_spinning
from muri.launcher.telemetry.script_clock import set_clock_provider
from muri.launcher.telemetry.trace import Trace, open_trace
from muri.launcher.wire import protocol

logger = logging.getLogger("muri.launcher")

STATUS_INTERVAL_S: Final = 1.0
REPORT_PATIENCE_S: Final = 3.0
"""Longer than the loss of another rank may hold a report back."""

SWITCH_INTERVAL_S: Final = 0.0001
"""A member that wakes up for a short stage should not wait long for another one's bytecode."""


_PATH: Final = click.Path(path_type=Path, resolve_path=True)


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """What one runtime is to do; see `main` for the meaning of the fields."""

    members: list[str]
    run_dir: Path
    discipline: str
    ordering: list[str | None]
    solo_iteration_s: dict[str, float]
    status_file: Path | None
    trace: Path | None
    preload: list[str]
    grace_s: float
    isolation: str = "thread"
    hang_timeout_s: float = HANG_TIMEOUT_S
    place: Place | None = None
    predicted_speed: dict[str, float] = field(default_factory=dict)
    gpu_mem_gib: dict[str, float] = field(default_factory=dict)
    accumulate_steps: dict[str, float] = field(default_factory=dict)
    device_mem_gib: float | None = None


class Runtime:
    """Serves the members of one group until it is told to end."""

    def __init__(self, options: RuntimeOptions) -> None:
        self._options = options
        self._told_to_end, self._tell_to_end = os.pipe()
        self._table = MemberTable(options.members, options.discipline)
        self._ranks = None if options.place is None else RankGroup(options.place, self._table, self._tell_end)
        arbiter: Arbiter
        if self._ranks is None:
            arbiter = make_arbiter(options.discipline, options.members, options.ordering, options.predicted_speed)
        else:
            arbiter = self._ranks.arbiter
        self._trace = _open_trace(options, shared=arbiter.takes_turns)
        self._table.watch(arbiter, options.solo_iteration_s, options.predicted_speed)
        factory = SessionFactory(arbiter, options.solo_iteration_s, self._trace, _base_path(), options.isolation)
        host_job = None if self._ranks is not None else os.environ.get("SLURM_JOB_ID")
        steps = {member: int(value) for member, value in options.accumulate_steps.items()}
        admission = AdmissionControl(host_job, self._table, options.discipline, accumulate_steps=steps)
        memory = MemoryAdmission(options.gpu_mem_gib, self._table.running, options.device_mem_gib)
        self._server = Server(options.run_dir, options.members, self._table, factory, self._ranks, admission, memory)
        self._hangs = HangWatch(self._table.running, arbiter, options.hang_timeout_s, self._ranks)
        self._guard = Guard(options.hang_timeout_s, self._end_as_hung)
        self._stopped = threading.Event()
        gpu_streams.preparation.expect(options.preload, takes_turns=arbiter.takes_turns)
        gpu_errors.watch.start(self._table.running, self._tell_end)

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT, then end the sessions; returns the process's exit code."""
        self._handle_signals()
        isolation.install()
        if stages_wanted(os.environ):
            automatic.install_stage_hooks()
        set_clock_provider(_clock_of_thread)
        self._guard.start()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        wait_without_spinning(os.environ)
        take_short_turns()
        if self._ranks is not None:
            self._ranks.start()
        self._server.start()
        logger.info("serving members %s in %s", ", ".join(self._options.members), self._options.run_dir)
        threading.Thread(target=self._preload, name="preload", daemon=True).start()
        reporter = threading.Thread(target=self._report, name="status", daemon=True)
        reporter.start()
        self._hangs.start()
        os.read(self._told_to_end, 1)
        self._end()
        self._stopped.set()
        self._table.changed.set()
        reporter.join()
        if self._trace is not None:
            self._trace.close()
        self._guard.close()
        lost = self._ranks is not None and self._ranks.lost
        return int(lost or gpu_errors.watch.fault is not None or self._server.end_cause is not None)

    def _handle_signals(self) -> None:
        def tell(signum: int, _frame: FrameType | None) -> None:
            self._tell_end()

        def ignore(signum: int, _frame: FrameType | None) -> None:
            """A handler, because children would inherit SIG_IGN."""

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, tell)
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
            signal.signal(number, ignore)

    def _tell_end(self) -> None:
        os.write(self._tell_to_end, b"x")

    def _end_as_hung(self, cause: str) -> None:
        """This process was stopped, and continued only for ending its scripts in order."""
        self._server.end_cause = f"the group's runtime hung: {cause}"
        self._tell_end()

    def _preload(self) -> None:
        for name in self._options.preload:
            try:
                importlib.import_module(name)
            except ImportError as error:
                logger.info("not loaded ahead: %s", error)
        gpu_streams.preparation.prepare()

    def _report(self) -> None:
        while True:
            last = self._stopped.is_set()
            try:
                if self._options.status_file is not None:
                    self._table.write_status(self._options.status_file)
                if self._trace is not None:
                    self._trace.flush()
            except OSError as error:
                logger.warning("the status could not be written: %s", error)
            if last:
                return
            # The host waits for the last member to end: that is told at once.
            self._table.changed.wait(STATUS_INTERVAL_S)
            self._table.changed.clear()

    def _end(self) -> None:
        self._server.close()
        if self._ranks is not None:
            self._ranks.end()
        sessions = self._table.running()
        logger.info("ending; %d sessions under way", len(sessions))
        for session in sessions:
            session.shut_down(self._options.grace_s)
        for session in sessions:
            session.ended.wait(self._options.grace_s + 1.0)
        self._server.await_reports(REPORT_PATIENCE_S)


def _base_path() -> list[str]:
    """sys.path without what `python -m` puts first."""
    return list(sys.path if sys.flags.safe_path else sys.path[1:])


def _open_trace(options: RuntimeOptions, *, shared: bool) -> Trace | None:
    if options.trace is None:
        return None
    return open_trace(options.trace, f"group {','.join(options.members)}", shared=shared)


def _clock_of_thread() -> StageClock | None:
    session = current_session()
    return None if session is None else session.clock


def parse_members(text: str) -> list[str]:
    """Job ids from "101,102".

    Raises:
        UsageError: One is empty, not a number or named twice.
    """
    members = text.split(",")
    for member in members:
        if not member.replace("_", "").isdecimal():
            raise UsageError(f"--members {text!r}: {member!r} is no job id; give for example 101,102")
    if len(set(members)) != len(members):
        raise UsageError(f"--members {text!r} names a job twice")
    return members


def parse_ordering(text: str | None, members: list[str]) -> list[str | None]:
    """The ordering from "101,-,102"; "-" is an empty place.

    Raises:
        UsageError: It does not hold every member once.
    """
    if text is None:
        return list(members)
    ordering = [None if entry == "-" else entry for entry in text.split(",")]
    if sorted(entry for entry in ordering if entry is not None) != sorted(members):
        raise UsageError(f"--ordering {text!r} must hold each of the members {','.join(members)} once")
    return ordering


def parse_solo_iterations(text: str | None, members: list[str]) -> dict[str, float]:
    """Iteration times from "101=0.5,102=0.1".

    Raises:
        UsageError: An entry is malformed or of no member.
    """
    return _parse_table("--solo-iteration-s", text, members, "seconds > 0")


def parse_predicted_speeds(text: str | None, members: list[str]) -> dict[str, float]:
    """Normalized speeds from "101=0.9,102=0.85".

    Raises:
        UsageError: An entry is malformed or of no member.
    """
    return _parse_table("--predicted-speed", text, members, "a speed > 0, where 1 is as fast as alone")


def _parse_table(option: str, text: str | None, members: list[str], meaning: str) -> dict[str, float]:
    table = {}
    for entry in text.split(",") if text else []:
        member, _, figure = entry.partition("=")
        try:
            value = float(figure)
        except ValueError:
            value = 0.0
        if member not in members or not 0 < value < float("inf"):
            raise UsageError(f"{option}: {entry!r} should be a member's id, = and {meaning}")
        table[member] = value
    return table


def _configure_log() -> None:
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter("%(asctime)sZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--members", required=True, help="Job ids of the members: 101,102.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Directory of the sockets, mode 0700.")
@click.option("--discipline", type=click.Choice(DISCIPLINES), default="auto", show_default=True)
@click.option("--ordering", help="Planned ordering for lockstep: 101,102; - is an empty place.")
@click.option("--solo-iteration-s", help="Iteration times when alone: 101=0.5,102=0.1 (else they are learnt).")
@click.option("--predicted-speed", help="Planned speeds, 1 = as alone: 101=0.9,102=0.8 (else auto measures both).")
@click.option("--accumulate-steps", help="Micro-batches of members that can split their batches: 101=4.")
@click.option("--gpu-mem-gib", help="Peak GPU memory of members alone: 101=3.5,102=8 (else they are let in).")
@click.option(
    "--device-mem-gib", type=click.FloatRange(min=0, min_open=True), help="Memory of the GPU, if not its own."
)
@click.option("--status-file", type=_PATH, help="JSON status, written every second.")
@click.option("--trace", type=_PATH, help="Trace for Perfetto (Chrome trace events); JSON lines if *.jsonl.")
@click.option("--preload", default="torch", show_default=True, help="Modules to import ahead, comma-separated.")
@click.option(
    "--isolation",
    type=click.Choice(["thread", "process"]),
    default="thread",
    show_default=True,
    help="How members run that do not say it themselves by $MURI_ISOLATION.",
)
@click.option(
    "--hang-timeout-s",
    type=click.FloatRange(min=0),
    default=HANG_TIMEOUT_S,
    show_default=True,
    help="End what has hung for so long; 0: never. A member's $MURI_HANG_TIMEOUT_S goes before it.",
)
@rank_options
@click.option("--grace-s", default=10.0, show_default=True, help="Seconds that scripts get to end at SIGTERM.")
def main(members: str, run_dir: Path | None, preload: str, **values: Any) -> None:
    """Serve the members of one group in one process, until SIGTERM."""
    ids = parse_members(members)
    values["ordering"] = parse_ordering(values["ordering"], ids)
    values["solo_iteration_s"] = parse_solo_iterations(values["solo_iteration_s"], ids)
    values["predicted_speed"] = parse_predicted_speeds(values["predicted_speed"], ids)
    values["accumulate_steps"] = _parse_table("--accumulate-steps", values["accumulate_steps"], ids, "a number ≥ 1")
    values["gpu_mem_gib"] = _parse_table("--gpu-mem-gib", values["gpu_mem_gib"], ids, "GiB > 0")
    run_dir = (run_dir or protocol.default_run_dir(os.environ)).absolute()
    place = take_place(values, os.environ)
    modules = [name for name in preload.split(",") if name]
    options = RuntimeOptions(members=ids, run_dir=run_dir, preload=modules, place=place, **values)
    _configure_log()
    code = Runtime(options).run()
    # Scripts that did not end, and their libraries' threads, must not hold the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(run_command(main))
