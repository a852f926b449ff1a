"""The process of a group's pilot job: starts the runtime on the GPUs, reports speeds, ends with the last member.

The batch script that `slurm_requests.pilot_job` writes runs it: `python -m muri.slurm_plugin.node.pilot --group JSON`.
"""

import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from muri.clock import MACHINE_CLOCK, Clock
from muri.commands import run_command
from muri.errors import UsageError
from muri.files import default_run_dir, make_run_dir
from muri.group_spec import GroupSpec, cancelled_pilot, read_group
from muri.inherited import settle_own
from muri.pythons import OLDEST_OF_THREADS, look_at, of_members
from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.node.member_processes import MemberProcesses, standard_error
from muri.slurm_plugin.node.pilot_watches import GroupReports, MemberWatch, NodeMonitor, read_status, runs_as_thread
from muri.slurm_plugin.node.proof import MISSING, why_missing
from muri.slurm_plugin.node.put_back import put_back
from muri.slurm_plugin.node.slurm_calls import state_of
from muri.text import log_handler

log = logging.getLogger("muri.pilot")

_TICK_S = 0.25

_RUNTIME_GRACE_S = 20.0

_PUT_BACK_S: Final = 10.0
"""Slurm kills a pilot job that it ends after KillWait, 30 s by default, of which the runtime's end may take 20 s."""

_PUT_BACK_AT_LEISURE_S: Final = 60.0
"""Where the pilot ends by itself. The SPANK plugin's epilog ends what is left."""

_STEP_TRIES = 3
"""srun gives up when slurmctld does not answer for half a minute; and the port for the ranks may be taken meanwhile."""

_PILOT_FILE = re.compile(r"(?:r[0-9]+-)?(?:pilot|host)-([0-9]{1,10})\.(?:(log|trace\.json)|json|use\.json)")

_KEEP_STATUS_S = 30.0

_KEEP_LOGS_S = 7 * 86400.0

KEY_VARIABLE, PORT_VARIABLE = "MURI_GROUP_KEY", "MURI_GROUP_PORT"


def runtime_command(group: GroupSpec, run_dir: Path, status: Path) -> list[str]:
    """Return the step that runs the runtime, one task for each of the group's GPUs.

    Slurm numbers the tasks, the ranks; rank 0 is on the node where this pilot runs, which srun tells the others.
    """
    tasks = group.node_count * group.gpus_per_node
    return [
        "srun", *_layout(group.node_count, group.gpus_per_node), "--kill-on-bad-exit=1", "--unbuffered",
        members_python(group) or sys.executable, "-m", "muri.launcher.runtime.main",
        "--group", group.to_text(),
        "--run-dir", str(run_dir),
        "--status-file", str(status),
        *(["--world-size", str(tasks)] if tasks > 1 else []),
        *(["--trace", str(status.with_suffix(".trace.json"))] if group.trace else []),
    ]  # fmt: skip


def _layout(nodes: int, tasks_per_node: int) -> list[str]:
    tasks = nodes * tasks_per_node
    layout = [f"--nodes={nodes}", f"--ntasks={tasks}", f"--ntasks-per-node={tasks_per_node}", "--distribution=block"]
    return layout if tasks > 1 else ["--ntasks=1"]


class PilotWatch:
    """Watches one runtime and its members."""

    def __init__(
        self,
        group: GroupSpec,
        status: Path,
        start_runtime: Callable[[], "subprocess.Popen[bytes]"],
        processes: MemberProcesses,
        clock: Clock = MACHINE_CLOCK,
        monitor: NodeMonitor | None = None,
    ) -> None:
        """Start the runtime and watch it; `processes` are the members', `monitor` measures the node's use."""
        self._pilot = int(os.environ["SLURM_JOB_ID"])
        self._clock = clock
        self._group = group
        self._status = status
        self._start_runtime = start_runtime
        self._runtime = start_runtime()
        self._tries_left = _STEP_TRIES - 1
        self._monitor = monitor
        self._processes = processes
        self._members = MemberWatch(self._pilot, group, clock)
        self._reports = GroupReports(self._pilot, group.telemetry_s, clock)
        self._ended_by_slurm = False
        self._looked_s, self._written_ns, self._silent_s, self._hung = clock(), 0, 0.0, ""

    def end_early(self) -> None:
        """End the runtime soon, because Slurm ends the pilot job. Safe in a signal handler."""
        self._ended_by_slurm = True

    def watch(self) -> int:
        """Return the pilot's exit code once the runtime or the last member has ended."""
        while True:
            if self._ended_by_slurm:
                return self._end_for_slurm()
            code = self._runtime.poll()
            status = self._runtime_status()
            if code is not None and self._tries_left and not self._status.exists():
                log.warning("the runtime's step ended with code %d before it began; it is started again", code)
                self._tries_left -= 1
                self._runtime = self._start_runtime()
            elif code is not None:
                return self._end_without_runtime(code, status)
            if self._members.is_over(status["members"], self._processes.look()):
                # The controller may have taken the members back while the runtime was ending because of a fault.
                return int(self._end_runtime())
            if self._hangs():
                self._silent_s, self._hung = 0.0, f"it gave no sign of life for {self._group.hang_timeout_s:g} s"
                log.error("the runtime hangs and is killed: %s", self._hung)
                with contextlib.suppress(KeyError, ProcessLookupError):
                    os.kill(status["pid"], signal.SIGKILL)  # what is stopped acts on no other signal
            self._reports.look(status)
            self._clock.sleep(_TICK_S)

    def _hangs(self) -> bool:
        """Return whether the runtime has written no status for the time in which a script would hang.

        A signal has stopped it alone, or C code of a member's thread keeps the interpreter's lock. Time in which this
        process was stopped as well, because Slurm has suspended the job, does not count.
        """
        now_s = self._clock()
        looked_s, self._looked_s = min(now_s - self._looked_s, 2 * _TICK_S), now_s
        with contextlib.suppress(OSError):
            before_ns, self._written_ns = self._written_ns, self._status.stat().st_mtime_ns
            self._silent_s = self._silent_s + looked_s if self._written_ns == before_ns else 0.0
        return 0 < self._group.hang_timeout_s <= self._silent_s

    def _end_for_slurm(self) -> int:
        """Put the members back first: their scripts are saved while the runtime still serves them."""
        log.warning(
            "pilot job %s, which holds the GPUs of its group, was canceled or has reached its time limit: "
            "members %s go back to the queue. To end one job of a group, cancel that job (scancel %s), not the "
            "pilot job", self._pilot, ", ".join(self._group.ids), self._group.ids[0],
        )  # fmt: skip
        self._put_back(lambda member: cancelled_pilot(str(self._pilot), member), _PUT_BACK_S)
        self._end_runtime()
        return 1

    def _end_without_runtime(self, code: int, status: Mapping[str, Any]) -> int:
        log.error("the runtime ended by itself with code %d; its members go back to the queue", code)
        self._reports.report_fault(status)
        cause = (status.get("fault") or {}).get("cause") or self._hung or f"it ended by itself with code {code}"
        self._put_back(lambda _member: f"the group's runtime is gone: {cause}", _PUT_BACK_AT_LEISURE_S)
        return code or 1

    def _put_back(self, reason: Callable[[str], str], within_s: float) -> None:
        """Put the members back; `muri run` does so itself for one that is a thread of the runtime."""
        members = self._runtime_status()["members"]
        threads = {name for name, member in members.items() if runs_as_thread(member)}
        found = self._processes.search()  # some may have come since the last look

        def open_stderr(member: str) -> int | None:
            script = members.get(member, {}).get("script_pid")
            return standard_error([*([script] if script else []), *sorted(found.get(member, ()))])

        names = {*self._group.ids, *members, *found} - threads
        put_back(self._pilot, names, reason, open_stderr, within_s, self._clock)

    def _end_runtime(self) -> bool:
        """End the runtime, and report the last figures; returns whether a fault has broken the GPU's context."""
        # The runtime itself, which saves what is possible: srun would answer a SIGTERM by killing the step at once.
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(self._runtime_status()["pid"], signal.SIGTERM)
        self._reports.end(self._runtime_status())  # meanwhile the runtime ends
        try:
            self._runtime.wait(_RUNTIME_GRACE_S)
        except subprocess.TimeoutExpired:
            self._runtime.kill()
        return self._reports.report_fault(self._runtime_status())

    def _runtime_status(self) -> dict[str, Any]:
        use = None if self._monitor is None else self._monitor.latest
        return read_status(self._status) | ({} if use is None else {"use": use})


@click.command()
@click.option("--group", "text", required=True, help="The group, as the JSON of muri.group_spec.GroupSpec.")
def main(text: str) -> None:
    """Hold a group's GPUs and run its runtime until the last member has ended."""
    group = with_possible_threads(read_group(text), os.environ)
    run_dir = default_run_dir(os.environ)
    make_run_dir(run_dir)
    job_id = os.environ["SLURM_JOB_ID"]
    remove_left_behind(run_dir, int(job_id), time.time())
    log_path = run_dir / f"pilot-{job_id}.log"
    status = run_dir / f"pilot-{job_id}.json"
    with log_path.open("ab", buffering=0) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    logging.basicConfig(level=logging.INFO, handlers=[log_handler()], force=True)
    log.info("pilot job %s for members %s", job_id, ",".join(group.ids))
    processes = MemberProcesses(int(job_id), group.ids)
    if why := why_without_grants(group, os.environ):
        refuse(group, why, processes)
        sys.exit(1)
    command = runtime_command(group, run_dir, status)
    monitor = NodeMonitor(status, processes)
    watch = PilotWatch(group, status, lambda: start(command, group), processes, monitor=monitor)
    monitor.start()
    # scancel and the time limit end the pilot: the runtime must not outlive it.
    signal.signal(signal.SIGTERM, lambda *_: watch.end_early())
    code = watch.watch()
    log.info("pilot job %s ends with code %d", job_id, code)
    status.unlink(missing_ok=True)
    monitor.close()
    sys.exit(code)


def why_without_grants(group: GroupSpec, environment: Mapping[str, str]) -> str:
    """Return why the members cannot get the GPUs of this pilot job on one of its nodes; "" where they can."""
    if group.node_count == 1:
        return why_missing(environment)
    command = ["srun", *_layout(group.node_count, 1), sys.executable, "-m", "muri.slurm_plugin.node.proof"]
    looked = subprocess.run(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=_for_steps(environment), check=False
    )
    if looked.returncode != MISSING:
        return ""
    said = [line for line in looked.stderr.decode(errors="replace").splitlines() if not line.startswith("srun:")]
    return said[0] if said else "Muri's SPANK plugin is not loaded on all of its nodes (docs/troubleshooting.md)"


def refuse(group: GroupSpec, why: str, processes: MemberProcesses, clock: Clock = MACHINE_CLOCK) -> None:
    """Put the members of a group that cannot run here back into the queue, also those that start in a moment."""
    pilot = int(os.environ["SLURM_JOB_ID"])
    log.error("the group cannot run here, and its members go back to the queue: %s", why)
    GroupReports(pilot, group.telemetry_s, clock).report_fault({"fault": {"cause": why, "culprits": []}})

    def open_stderr(member: str) -> int | None:
        return standard_error(sorted(processes.search().get(member, ())))

    put_back(pilot, group.ids, lambda _member: why, open_stderr, _PUT_BACK_AT_LEISURE_S, clock, await_start=True)


def remove_left_behind(run_dir: Path, own: int, now_s: float) -> None:
    """Remove files of earlier pilot jobs than `own` in the user's directory: killed ones' status, old logs and traces.

    Only Slurm can say which pilots are gone: the directory may be shared by several nodes. It need not be asked about
    one whose runtime lives and replaces its status every second.
    """
    others: dict[Path, int] = {}
    for path in run_dir.iterdir():
        if (name := _PILOT_FILE.fullmatch(path.name)) and int(name[1]) != own:
            with contextlib.suppress(FileNotFoundError):
                if now_s - path.lstat().st_mtime > (_KEEP_LOGS_S if name[2] else _KEEP_STATUS_S):
                    others[path] = int(name[1])
    try:
        gone = {pilot for pilot in sorted(set(others.values())) if not state_of(pilot)}
    except GatewayError as error:
        log.warning("files of earlier pilot jobs stay in %s: %s", run_dir, error)
        return
    for path, pilot in others.items():
        if pilot in gone:
            path.unlink(missing_ok=True)


def members_python(group: GroupSpec) -> str:
    """Return the members' own Python if it must run the runtime, because members are its threads; else ""."""
    return group.python if group.threads else ""


def with_possible_threads(group: GroupSpec, environment: Mapping[str, str]) -> GroupSpec:
    """Return the group with processes in place of threads where the members' Python is too old to run the runtime."""
    python = members_python(group)
    try:
        if not python or look_at(python, of_members(environment)).release >= OLDEST_OF_THREADS:
            return group
    except UsageError as error:
        log.warning("members get processes of their own: %s", error)
    return replace(group, members=tuple(replace(member, isolation="process") for member in group.members))


def start(command: list[str], group: GroupSpec) -> "subprocess.Popen[bytes]":
    """Start the step, with a port at which its ranks meet and a fresh key by which they authenticate each other.

    Muri need not be installed in the members' own Python. srun refuses two figures of CPUs that differ, as they do
    where Slurm gave the pilot more than it asked for: the given ones count.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    own = of_members(os.environ) if members_python(group) else dict(os.environ)
    environment = _for_steps(own) | {KEY_VARIABLE: secrets.token_hex(32), PORT_VARIABLE: str(port)}
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)


def _for_steps(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != "SLURM_TRES_PER_TASK"}


if __name__ == "__main__":
    settle_own()
    sys.exit(run_command(main))
