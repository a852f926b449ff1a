"""The process of a group's placeholder job: starts the runtime on the GPUs, reports speeds, ends with the last member.

The batch script that `slurm_requests.pilot_job` writes runs it: `python -m muri.slurm_plugin.node.pilot --group JSON`.
"""

import contextlib
import json
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from muri.clock import MACHINE_CLOCK, Clock
from muri.commands import run_command
from muri.errors import UsageError
from muri.group_spec import GroupSpec, read_group
from muri.pythons import OLDEST_OF_THREADS, look_at, of_members
from muri.run_dir import default_run_dir, make_run_dir
from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError, SlurmUnreachableError
from muri.slurm_plugin.node.slurm_calls import active_jobs, job_field, set_comment
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.comment_reports import fault_token, speeds_token, with_foreign_python, with_measured
from muri.utc import log_handler

log = logging.getLogger("muri.pilot")

_TICK_S = 0.25

# While members run, their end shows in the runtime's own status, so Slurm is asked rarely.
_SLOW_POLL_S = 60.0

# Once every member's training has ended, their jobs are about to: the GPUs are given back without delay.
_EAGER_POLL_S = 0.25

_EAGER_POLLS = 40

_RUNTIME_GRACE_S = 20.0

_PILOT_FILE = re.compile(r"host-([0-9]{1,10})\.(?:json|log|trace\.json)")

_KEEP_LOGS_S = 7 * 86400.0

KEY_VARIABLE = "MURI_GROUP_KEY"


def runtime_command(group: GroupSpec, run_dir: Path, status: Path) -> list[str]:
    """Return the step that runs the runtime, one task for each of the group's GPUs."""
    step, ranks = step_options(group)
    return [
        "srun", *step, "--kill-on-bad-exit=1", "--unbuffered",
        members_python(group) or sys.executable, "-m", "muri.launcher.runtime.main", "--steps",
        "--group", group.to_text(),
        "--run-dir", str(run_dir),
        "--status-file", str(status),
        *ranks,
        *(["--trace", str(status.with_suffix(".trace.json"))] if group.trace else []),
    ]  # fmt: skip


class PilotWatch:
    """Watches one runtime and its members."""

    def __init__(
        self, group: GroupSpec, status: Path, runtime: "subprocess.Popen[bytes]", clock: Clock = MACHINE_CLOCK
    ) -> None:
        """Bind the watch to a started runtime."""
        self._clock = clock
        self._members = [int(member) for member in group.ids]
        self._group = group
        self._status = status
        self._runtime = runtime
        self._begun_s = self._polled_s = self._reported_s = clock()
        self._report: str | None = None
        self._measured: set[str] = set()
        self._try_again_s = self._begun_s
        self._eager_polls_left = _EAGER_POLLS
        self._ended_by_slurm = False

    def end_early(self) -> None:
        """End the runtime soon, because Slurm ends the pilot job. Safe in a signal handler."""
        self._ended_by_slurm = True

    def watch(self) -> int:
        """Return the pilot's exit code once the runtime or the last member has ended."""
        while True:
            if self._ended_by_slurm:
                self._tell_members()
                self._tell_runtime()
                self._await_runtime()
                return 1
            code = self._runtime.poll()
            if code is not None:
                log.error("the runtime ended by itself with code %d; its members go back to the queue", code)
                self._report_fault()
                return code or 1
            if self._finished():
                self._tell_runtime()
                self._report_progress()  # meanwhile the runtime ends
                return self._await_runtime()
            if self._clock() - self._reported_s >= self._group.telemetry_s:
                self._report_progress()
            elif self._clock() >= self._try_again_s:
                self._report_measurements()  # at once: waiting jobs may join whom the plan knows
            self._clock.sleep(_TICK_S)

    def _tell_members(self) -> None:
        """Say in the log why the members go back to the queue, and how a member is cancelled."""
        members = self._group.ids
        log.warning(
            "pilot job %s, which holds the GPUs of its group, was cancelled or has reached its time limit: members %s "
            "go back to the queue. To end one job of a group, cancel that job (scancel %s), not the pilot job",
            os.environ["SLURM_JOB_ID"], ", ".join(members), members[0],
        )  # fmt: skip

    def _runtime_status(self) -> dict[str, Any]:
        """What the runtime last wrote about itself; empty until it first writes."""
        try:
            status = json.loads(self._status.read_text())
        except (OSError, ValueError):
            return {}
        return status if isinstance(status, dict) else {}

    def _members_status(self) -> dict[str, Any]:
        members = self._runtime_status().get("members")
        return members if isinstance(members, dict) else {}

    def _finished(self) -> bool:
        """Ask Slurm whether any member is left, rarely while members run."""
        member_states = {member.get("state") for member in self._members_status().values()}
        busy = "running" in member_states
        now_s = self._clock()
        if now_s - self._polled_s < self._poll_interval_s(member_states):
            return False
        self._polled_s = now_s
        if member_states == {"ended"}:
            self._eager_polls_left = max(0, self._eager_polls_left - 1)
        try:
            late = now_s - self._begun_s > self._group.attach_timeout_s
            states = present_members(self._members, self._members_status(), late=late)
        except SlurmUnreachableError as error:
            log.warning("cannot ask for the members' states, going on: %s", error)
            return False
        if not states:
            log.info("every member has ended")
            return True
        if late and not busy and all(state == "PENDING" for state in states.values()):
            log.warning("members %s could not start beside the pilot job; giving the GPUs back", sorted(states))
            return True
        return False

    def _poll_interval_s(self, member_states: set[str | None]) -> float:
        if "running" in member_states:
            self._eager_polls_left = _EAGER_POLLS
            return _SLOW_POLL_S
        if member_states == {"ended"} and self._eager_polls_left:
            return _EAGER_POLL_S
        return self._group.poll_s

    def _report_progress(self) -> None:
        """Tell the controller what the runtime knows of its members, through jobs' comments."""
        self._reported_s = self._clock()
        self._report_speeds()
        self._report_measurements()

    def _report_measurements(self) -> None:
        """Tell of each member once what its first iterations say."""
        for job_id, member in self._members_status().items():
            if member.get("measured") and job_id not in self._measured:
                self._report_measured(job_id, member["measured"])

    def _report_measured(self, job_id: str, found: Mapping[str, Any]) -> None:
        """Tell what a member's first iterations say of its model, once, through that job's own comment."""
        try:
            told = found if "error" in found else with_foreign_python(found, sys.prefix)
            set_comment(int(job_id), with_measured(job_field(int(job_id), "comment"), told))
        except SlurmUnreachableError as error:
            log.warning("job %s is measured, which cannot be told now: %s", job_id, error)
            self._try_again_s = self._clock() + self._group.telemetry_s
            return
        except GatewayError as error:
            log.warning("job %s is measured, which cannot be told: %s", job_id, error)
        self._measured.add(job_id)

    def _report_speeds(self) -> None:
        """Tell each member's progress and times through the pilot job's comment."""
        report = speeds_token(self._runtime_status())
        if report is not None and report != self._report:
            try:
                set_comment(int(os.environ["SLURM_JOB_ID"]), report)
                self._report = report
            except GatewayError as error:
                log.warning("cannot report speeds: %s", error)

    def _report_fault(self) -> None:
        """Report through the pilot job's comment which members may have broken the GPU's context."""
        token = fault_token(self._runtime_status())
        if token is not None:
            try:
                set_comment(int(os.environ["SLURM_JOB_ID"]), token)
            except GatewayError as error:
                log.warning("cannot report the fault; every member runs alone: %s", error)

    def _tell_runtime(self) -> None:
        """Tell the runtime itself, which saves what it can: srun would answer a SIGTERM by killing the step at once."""
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(self._runtime_status()["pid"], signal.SIGTERM)

    def _await_runtime(self) -> int:
        try:
            self._runtime.wait(_RUNTIME_GRACE_S)
        except subprocess.TimeoutExpired:
            self._runtime.kill()
        return 0


@click.command()
@click.option("--group", "text", required=True, help="The group, as the JSON of muri.group_spec.GroupSpec.")
def main(text: str) -> None:
    """Hold a group's GPUs and run its runtime until the last member has ended."""
    group = with_possible_threads(read_group(text), os.environ)
    run_dir = default_run_dir(os.environ)
    make_run_dir(run_dir)
    job_id = os.environ["SLURM_JOB_ID"]
    remove_left_behind(run_dir, int(job_id), time.time())
    log_path = run_dir / f"host-{job_id}.log"
    status = run_dir / f"host-{job_id}.json"
    with log_path.open("ab", buffering=0) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    logging.basicConfig(level=logging.INFO, handlers=[log_handler()], force=True)
    log.info("pilot job %s for members %s", job_id, ",".join(group.ids))
    command = runtime_command(group, run_dir, status)
    watch = PilotWatch(group, status, start(command, group))
    # scancel and the time limit end the pilot: the runtime must not outlive it.
    signal.signal(signal.SIGTERM, lambda *_: watch.end_early())
    code = watch.watch()
    log.info("pilot job %s ends with code %d", job_id, code)
    status.unlink(missing_ok=True)
    sys.exit(code)


def remove_left_behind(run_dir: Path, own: int, now_s: float) -> None:
    """Remove what earlier pilot jobs of this user have left: status files of killed ones, old logs and traces.

    Only Slurm can tell which pilots are gone: the directory may be shared by several nodes.

    Args:
        run_dir: The user's run directory.
        own: This pilot job.
        now_s: The time, seconds since the epoch.
    """
    files = {path: int(name[1]) for path in run_dir.iterdir() if (name := _PILOT_FILE.fullmatch(path.name))}
    others = {path: pilot for path, pilot in files.items() if pilot != own and _has_served(path, now_s)}
    if not others:
        return
    try:
        alive = active_jobs(sorted(set(others.values())))
    except GatewayError as error:
        log.warning("files of earlier pilot jobs stay in %s: %s", run_dir, error)
        return
    for path, pilot in others.items():
        if pilot not in alive:
            path.unlink(missing_ok=True)


def _has_served(path: Path, now_s: float) -> bool:
    """Whether a file is of no use once its pilot job is gone: a status at once, a log or a trace after a while."""
    with contextlib.suppress(FileNotFoundError):
        return path.suffixes == [".json"] or now_s - path.lstat().st_mtime > _KEEP_LOGS_S
    return False


def present_members(known: Iterable[int], status: Mapping[str, Any], *, late: bool) -> dict[int, str]:
    """Return the states of the members that still wait or run.

    A job that was stopped and returned to the queue is no longer a member: its AdminComment no longer names this
    pilot. This is checked only while no member runs, and not for members that have yet to attach: the controller
    tags them a moment after it submits the pilot.

    Args:
        known: The members that the pilot started with.
        status: The members' part of the runtime's status.
        late: Whether members should have attached by now.

    Raises:
        SlurmUnreachableError: slurmctld does not answer.
    """
    pilot, own = int(os.environ["SLURM_JOB_ID"]), list(known)
    found = _serving(pilot, own, status, late=late)
    if any(state != "PENDING" for state in found.values()):
        return found
    # Who joined later stands in the pilot's comment: it is read only before the group would end.
    with contextlib.suppress(NoSuchJobError):
        _, members = tags.parse_pilot(job_field(pilot, "admin_comment")) or ("", ())
        joined = [job_id for job_id in members if job_id not in own]
        found |= _serving(pilot, joined, status, late=late) if joined else {}
    return found


def _serving(pilot: int, members: list[int], status: Mapping[str, Any], *, late: bool) -> dict[int, str]:
    states = active_jobs(members)
    at_work = {name: member.get("state") for name, member in status.items()}
    if "running" in at_work.values():
        return states
    due = {job_id for job_id in states if late or at_work.get(str(job_id)) == "ended"}
    return {job_id: state for job_id, state in states.items() if job_id not in due or _serves(pilot, job_id)}


def _serves(pilot: int, job_id: int) -> bool:
    try:
        comment = job_field(job_id, "admin_comment")
    except NoSuchJobError:
        return False
    state = tags.parse_state(comment)
    return state is not None and state.pilot == pilot


def step_options(group: GroupSpec) -> tuple[list[str], list[str]]:
    """Return what srun and each runtime are told of the group's ranks.

    Slurm numbers the tasks; rank 0 is on the node where this pilot runs, which srun tells the others.
    """
    nodes, gpus = group.node_count, group.gpus_per_node
    if nodes * gpus == 1:
        return ["--ntasks=1"], []
    step = [f"--nodes={nodes}", f"--ntasks={nodes * gpus}", f"--ntasks-per-node={gpus}", "--distribution=block"]
    return step, ["--world-size", str(nodes * gpus), "--order-port", str(free_port())]


def free_port() -> int:
    """Return a free TCP port of this node."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


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
    """Start the step, with a fresh key by which its ranks authenticate each other.

    Muri need not be installed in the members' own Python.
    """
    own = of_members(os.environ) if members_python(group) else dict(os.environ)
    environment = own | {KEY_VARIABLE: secrets.token_hex(32)}
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)


if __name__ == "__main__":
    sys.exit(run_command(main))
