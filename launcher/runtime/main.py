"""The process that a group shares: `python -m muri.launcher.runtime.main --group JSON …`.

Where members are its threads it runs under their own Python: the standard library and PyTorch are all that it may need.
Where none is, it never loads PyTorch.
"""

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from muri.errors import MuriError, UsageError
from muri.files import default_run_dir
from muri.group_spec import GroupSpec, read_group
from muri.inherited import settle_own
from muri.launcher.arbitration.arbiter import Arbiter, PausingArbiter
from muri.launcher.arbitration.switching import Node, make_arbiter
from muri.launcher.runtime.admission import AdmissionControl
from muri.launcher.runtime.hangs import HangWatch, SuspensionWatch
from muri.launcher.runtime.link import Place
from muri.launcher.runtime.member_table import MemberTable
from muri.launcher.runtime.ranks import Ranks
from muri.launcher.runtime.server import Server
from muri.launcher.script.trace import Trace
from muri.launcher.sessions.setup import has_gpu, take_short_turns, wait_without_spinning
from muri.launcher.threads import SharedProcess, shared_process
from muri.text import log_handler, printable_lines

logger = logging.getLogger("muri.launcher")

KEY_VARIABLE: Final = "MURI_GROUP_KEY"
PORT_VARIABLE: Final = "MURI_GROUP_PORT"
"""Rank 0's port; all users of a node can read its processes' command lines."""


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """What one runtime is to do; see `read_options` for the meaning of the fields."""

    group: GroupSpec
    run_dir: Path
    status_file: Path | None
    trace: Path | None
    preload: list[str]
    grace_s: float
    node: Node
    place: Place | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _path(text: str) -> Path:
    return Path(text).resolve()


def read_options(words: Sequence[str], environment: Mapping[str, str]) -> RuntimeOptions:
    """Return the options in a command line, and in variables with the group's key and Slurm's facts."""
    parser = _Parser(
        prog="python -m muri.launcher.runtime.main",
        description="Serve the members of one group in one process, until SIGTERM.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--group", required=True, help="The group, as the JSON of muri.group_spec.GroupSpec.")
    add("--run-dir", type=Path, help="Directory of the sockets, mode 0700.")
    add("--status-file", type=_path, help="JSON status, written every second.")
    add("--trace", type=_path, help="Trace for Perfetto (Chrome trace events).")
    add("--preload", default="torch", help="Modules to import ahead, comma-separated (default: %(default)s).")
    add("--world-size", type=int, default=1, help="Runtimes of the group, one per GPU; srun numbers them.")
    add("--grace-s", type=float, default=10.0, help="Seconds that scripts get to end at SIGTERM (%(default)s).")
    values = vars(parser.parse_args(words))
    group = read_group(values.pop("group"))
    place = parse_place(values.pop("world_size"), environment)
    for name in (KEY_VARIABLE, PORT_VARIABLE):  # members' scripts have no use for them
        os.environ.pop(name, None)
    if place is not None and place.rank > 0:  # ranks may share a directory; rank 0's files are the group's
        for name in ("status_file", "trace"):
            if values[name] is not None:
                values[name] = values[name].with_name(f"r{place.rank}-{values[name].name}")
    run_dir = (values.pop("run_dir") or default_run_dir(environment)).absolute()
    preload = [name for name in values.pop("preload").split(",") if name]
    # Members in their own jobs bring the CPUs that Slurm gave them; only threads have the pilot's.
    node = Node(cpus_of(environment) if group.threads else os.cpu_count() or 1, has_gpu())
    return RuntimeOptions(group=group, run_dir=run_dir, preload=preload, node=node, place=place, **values)


def cpus_of(environment: Mapping[str, str]) -> int:
    """Return the cores of this runtime's own process: those of Slurm's variables, as far as the kernel allows them.

    Where Slurm does not confine jobs, only its variables tell.
    """
    allowed = len(os.sched_getaffinity(0))
    given = environment.get("SLURM_CPUS_PER_TASK") or environment.get("SLURM_CPUS_ON_NODE") or ""
    return max(1, min(allowed, int(given))) if given.isdecimal() else allowed


def parse_place(world_size: int, environment: Mapping[str, str]) -> Place | None:
    """Return the place of this runtime in its group by srun's variables; None for the only one of its group."""
    if world_size == 1:
        return None
    rank, host = int(environment.get("SLURM_PROCID", "-1")), environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if not 0 <= rank < world_size:
        raise UsageError(f"$SLURM_PROCID is {rank} and must be 0 to {world_size - 1} with --world-size {world_size}")
    if not host:
        raise UsageError("--world-size above 1 needs rank 0's node in $SLURM_LAUNCH_NODE_IPADDR")
    port = environment.get(PORT_VARIABLE, "")
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UsageError(f"--world-size above 1 needs rank 0's port in ${PORT_VARIABLE}, not {port!r}")
    key = environment.get(KEY_VARIABLE, "")
    if len(key) < 32:
        raise UsageError(f"--world-size above 1 needs a secret of at least 32 characters in ${KEY_VARIABLE}")
    return Place(rank, world_size, host, int(port), key.encode())


STATUS_INTERVAL_S: Final = 1.0
MEANS_INTERVAL_S: Final = 0.25
"""The same while the first means of a model never seen are due: the planner may wait for them."""

REPORT_TIMEOUT_S: Final = 3.0

SWITCH_INTERVAL_S: Final = 0.0001
"""A member that wakes up for a short stage should not wait long for another one's bytecode."""

_END: Final = b"\0"
"""Tells the main thread to end; through the same pipe come the numbers of signals."""


class Runtime:
    """Serves the members of one group until it is told to end."""

    def __init__(self, options: RuntimeOptions) -> None:
        self._options = options
        self._told_to_end, self._tell_to_end = os.pipe()
        group = options.group
        self._table = MemberTable(group)
        self._ranks = None if options.place is None else Ranks(options.place, self._table, self._tell_end)
        in_turns = group.discipline != "plain"
        self._threads: SharedProcess | None = None
        # One member's process group could stop the others as it ends, so members of several ranks have processes.
        if group.threads and self._ranks is None:
            self._threads = shared_process()(
                group.threads, options.preload, self._table.running, self._tell_end, takes_turns=in_turns
            )
        speeds = {member.job_id: member.predicted_speed for member in group.members if member.predicted_speed}
        arbiter: Arbiter
        if self._ranks is None:
            promises = any(member.min_speed for member in group.members)
            arbiter = make_arbiter(
                group.discipline, group.ids, group.rotation, speeds, node=options.node, promises=promises
            )
        else:
            arbiter = self._ranks.arbiter
        pausing = PausingArbiter(arbiter)
        self._suspension = SuspensionWatch(self._table.running, pausing)
        name = f"group {','.join(group.ids)}"
        self._trace = None if options.trace is None else Trace(options.trace, name, shared=in_turns)
        self._table.watch(arbiter, has_gpu=options.node.has_gpu, threads=self._threads)
        admission = AdmissionControl(os.environ.get("SLURM_JOB_ID"), self._table)
        self._server = Server(options.run_dir, self._table, pausing, admission, self._ranks, self._trace)
        exchange = None if self._ranks is None else self._ranks.exchange
        self._hangs = HangWatch(self._table.running, pausing, group.hang_timeout_s, exchange)
        self._stopped = threading.Event()

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT, then end the sessions; returns the process's exit code."""
        self._handle_signals()
        if self._threads is not None:
            self._threads.install()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        wait_without_spinning(os.environ)
        take_short_turns()
        if self._ranks is not None:
            self._ranks.start()
        self._server.start()
        logger.info("serving members %s in %s", ", ".join(self._options.group.ids), self._options.run_dir)
        if self._threads is not None:
            threading.Thread(target=self._threads.preload, name="preload", daemon=True).start()
        reporter = threading.Thread(target=self._report, name="status", daemon=True)
        reporter.start()
        self._hangs.start()
        self._suspension.start()
        while os.read(self._told_to_end, 1) != _END:
            pass  # a signal has come: its handler runs now
        self._end()
        self._stopped.set()
        self._table.changed.set()
        reporter.join()
        if self._trace is not None:
            self._trace.close()
        lost = self._ranks is not None and bool(self._ranks.lost)
        faulty = self._threads is not None and self._threads.faults.fault is not None
        return int(lost or faulty)

    def _handle_signals(self) -> None:
        def tell(signum: int, _frame: FrameType | None) -> None:
            self._server.ended_by_signal = True
            self._tell_end()

        def ignore(signum: int, _frame: FrameType | None) -> None:
            """A handler, because children would inherit SIG_IGN."""

        # The kernel may let any thread take a signal; Python's handler then runs once the main one does anything.
        os.set_blocking(self._tell_to_end, False)
        signal.set_wakeup_fd(self._tell_to_end, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, tell)
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
            signal.signal(number, ignore)

    def _tell_end(self) -> None:
        os.write(self._tell_to_end, _END)

    def _report(self) -> None:
        while True:
            last = self._stopped.is_set()
            try:
                if self._options.status_file is not None:
                    self._table.write_status(self._options.status_file)
                self._table.end_measurements()
                self._table.look_at_promises()
                if self._trace is not None:
                    self._trace.flush()
            except OSError as error:
                logger.warning("the status could not be written: %s", error)
            if last:
                return
            # The pilot waits for the last member to end, so write each end at once.
            self._table.changed.wait(MEANS_INTERVAL_S if self._table.awaits_means else STATUS_INTERVAL_S)
            self._table.changed.clear()

    def _end(self) -> None:
        self._server.close()
        if self._ranks is not None:
            self._ranks.end()
        self._suspension.close()
        sessions = self._table.running()
        logger.info("ending; %d sessions under way", len(sessions))
        for session in sessions:
            session.shut_down(self._options.grace_s)
        for session in sessions:
            session.ended.wait(self._options.grace_s + 1.0)
        self._server.await_reports(REPORT_TIMEOUT_S)


def main() -> int:
    """Serve the members of one group in one process, until SIGTERM; return the exit code after an error."""
    try:
        options = read_options(sys.argv[1:], os.environ)
        logger.addHandler(log_handler(with_name=False))
        logger.setLevel(logging.INFO)
        logger.propagate = False
        code = Runtime(options).run()
    except MuriError as error:
        print(f"muri: {printable_lines(str(error))}", file=sys.stderr)
        return error.exit_code
    # Scripts that did not end, and their libraries' threads, must not hold the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    settle_own()
    sys.exit(main())
