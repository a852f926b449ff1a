"""A pilot job's three looks: whether a member is left, the reports that are due to the controller, the node's use."""

import contextlib
import logging
import math
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from muri.clock import Clock, now_text
from muri.files import atomic_json, use_file
from muri.group_spec import GroupSpec
from muri.profiler.usage import Monitor
from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError, SlurmUnreachableError
from muri.slurm_plugin.node.member_processes import MemberProcesses
from muri.slurm_plugin.node.slurm_calls import growing_pauses, job_record, set_comment
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.comment_reports import (
    DIFFERS_BY,
    PLAIN,
    fault_token,
    iteration_times_s,
    speeds_token,
    with_foreign_python,
    with_measured,
)
from muri.text import json_of

log = logging.getLogger("muri.pilot")

Members = Mapping[str, Any]
"""The members' part of the runtime's status, by job id."""

AT_WORK: Final = "at work"
ENDED: Final = "ended"
AWAITED: Final = "awaited"

FIRST_PAUSE_S: Final = {AT_WORK: 600.0, ENDED: 0.5, AWAITED: 4.0}
"""Before the first question. Of a member at work the runtime sees the script's process, and this node those of its job:
Slurm is asked only in case that something is wrong. Once none is left, the jobs are about to end: the GPUs are given
back soon."""

_MOST_AT_WORK_S: Final = 1800.0


class MemberWatch:
    """Says whether any member is left: a job that runs is one, attached to the runtime or not.

    The runtime reports those at work and this node shows their processes; Slurm is asked about the others.
    """

    def __init__(self, pilot: int, group: GroupSpec, clock: Clock) -> None:
        self._pilot = pilot
        self._group = group
        self._clock = clock
        self._late_s = clock() + group.attach_timeout_s
        self._seen: tuple[str, int] | None = None
        self._pauses: Iterator[float] = iter(())
        self._ask_s = math.inf
        self._last_found = 0

    def is_over(self, members: Members, here: Collection[str] = ()) -> bool:
        """Return whether the pilot can exit; `here` are the jobs of members that have processes on this node."""
        states = {member.get("state") for member in members.values()}
        phase = AT_WORK if here or "running" in states else ENDED if states == {"ended"} else AWAITED
        # Pauses are short again when a script has started, or the last one has ended.
        if (seen := (phase, _sessions(members))) != self._seen:
            self._seen = seen
            most_s = _MOST_AT_WORK_S if phase == AT_WORK else self._group.poll_s
            self._pauses = growing_pauses(FIRST_PAUSE_S[phase], most_s, self._pilot)
            self._ask_s = self._clock() + next(self._pauses)
        if self._clock() < self._ask_s:
            return False
        self._ask_s = self._clock() + next(self._pauses)
        try:
            return not self._is_any_left(members, here, at_work=phase == AT_WORK)
        except SlurmUnreachableError as error:
            log.warning("cannot ask for the members' states, going on: %s", error)
            return False

    def _is_any_left(self, members: Members, here: Collection[str], *, at_work: bool) -> bool:
        """Ask about one member after the other, until one is found that the GPUs wait for."""
        late = not at_work and self._clock() > self._late_s
        waiting: list[int] = []
        for job_id in self._members(members, here):
            asks_tag = not at_work and (late or members.get(str(job_id), {}).get("state") == "ended")
            try:
                record = job_record(job_id)
            except NoSuchJobError:
                continue
            # A job that was stopped and returned to the queue names this pilot no more. The controller tags members a
            # moment after it submits the pilot, so those that have yet to attach are not asked for it.
            tag = tags.parse_state(record.admin_comment) if asks_tag else None
            if not record.is_active or (asks_tag and (tag is None or tag.pilot != self._pilot)):
                continue
            if record.state != "PENDING" or not late:
                self._last_found = job_id
                return True
            waiting.append(job_id)
        if waiting:
            log.warning("members %s could not start beside the pilot job; giving the GPUs back", sorted(waiting))
        else:
            log.info("every member has ended")
        return False

    def _members(self, members: Members, here: Collection[str]) -> Iterator[int]:
        """Yield all members, first those that are probably there."""
        at_work = [int(name) for name, member in members.items() if member.get("state") == "running" or name in here]
        at_work += [int(name) for name in here if name not in members]
        known = dict.fromkeys([*at_work, *map(int, self._group.ids), *map(int, members)])
        yield from sorted(known, key=lambda job_id: (job_id not in at_work, job_id != self._last_found))
        # The pilot's own AdminComment lists jobs that joined later; it is read only before the group would end.
        with contextlib.suppress(NoSuchJobError):
            _, joined = tags.parse_pilot(job_record(self._pilot).admin_comment) or ("", ())
            yield from (job_id for job_id in joined if job_id not in known)


def _sessions(members: Members) -> int:
    return sum(member.get("sessions", 0) for member in members.values())


_LEAST_GAP_S: Final = 60.0
"""Least time between two reports of changed speeds, until the first one of a new member, and until a further try."""

_MEASURED_S: Final = 45.0
"""The runtime measures speeds over 30 s, or over its members' last iterations where these take longer; and two looks
of the pilot are seconds apart."""

_MEASURED_ITERATIONS: Final = 50


class ReportTimes:
    """Says when speeds are to be reported. Pure.

    Soon after a script has started, then more and more rarely, at last every `telemetry_s`; between these when a
    speed has changed by more than a fifth, or speeds in a new company are known; at once when a promise is broken or
    kept again, which takes a minute.
    """

    def __init__(self, telemetry_s: float, pilot: int) -> None:
        self._telemetry_s = telemetry_s
        self._pilot = pilot
        self._gap_s = min(_LEAST_GAP_S, telemetry_s)
        self._sessions = -1
        self._pauses: Iterator[float] = iter(())
        self._next_s = self._tried_s = 0.0
        self._failed = False
        self._times_s: dict[str, float] = {}
        self._broken: frozenset[str] = frozenset()

    def is_due(self, now_s: float, members: Members, *, news: bool = False) -> bool:
        """Return whether speeds are to be reported now; `news`: those of a company that was not reported yet."""
        if (sessions := _sessions(members)) != self._sessions:
            self._sessions = sessions
            self._pauses = growing_pauses(self._gap_s, self._telemetry_s, self._pilot)
            self._next_s = now_s + next(self._pauses)
        has_paused = now_s - self._tried_s >= self._gap_s
        if self._failed:
            return has_paused
        news = has_paused and (news or self._has_changed(members))
        return news or now_s >= self._next_s or _broken(members) != self._broken

    def tried(self, now_s: float, members: Members, *, reported: bool) -> None:
        """Take note of a report of the speeds, or that Slurm did not take it."""
        self._tried_s, self._failed = now_s, not reported
        if reported:
            self._next_s = now_s + next(self._pauses)
            self._times_s, self._broken = iteration_times_s(members), _broken(members)

    def _has_changed(self, members: Members) -> bool:
        before_s = self._times_s
        return any(
            abs(time_s - before_s[name]) > DIFFERS_BY * before_s[name]
            for name, time_s in iteration_times_s(members).items()
            if name in before_s and members[name].get("state") == "running"
        )


def _broken(members: Members) -> frozenset[str]:
    return frozenset(name for name, member in members.items() if member.get("promise_broken"))


class Company:
    """Says which members have been at work together for long enough that the measured speeds are of just them. Pure."""

    def __init__(self) -> None:
        self._at_work: frozenset[str] = frozenset()
        self._since_s = 0.0

    def steady(self, now_s: float, members: Members) -> frozenset[str]:
        """Return the members at work; empty where one of them came or went while their speeds were measured.

        It has to be called at each look: changes between two looks are not seen.
        """
        at_work = frozenset(
            name for name, member in members.items() if member.get("state") == "running" and not member.get("paused")
        )
        if at_work != self._at_work:
            self._at_work, self._since_s = at_work, now_s
        slowest_s = max((iteration_times_s(members).get(name, 0.0) for name in at_work), default=0.0)
        measured_s = max(_MEASURED_S, _MEASURED_ITERATIONS * slowest_s)
        return at_work if now_s - self._since_s >= measured_s else frozenset()


class GroupReports:
    """Reports of one pilot job to the controller, in jobs' comments: speeds rarely, news promptly."""

    def __init__(self, pilot: int, telemetry_s: float, clock: Clock) -> None:
        self._pilot = pilot
        self._clock = clock
        self._times = ReportTimes(telemetry_s, pilot)
        self._company = Company()
        self._steady: frozenset[str] = frozenset()
        self._reported_steady: frozenset[str] = frozenset()
        self._report: str | None = None
        self._measured: dict[str, tuple[int, float]] = {}
        self._measure_s = clock()

    def look(self, status: Mapping[str, Any]) -> None:
        """Report what is due of the runtime's status."""
        members = status.get("members", {})
        self._steady = self._company.steady(self._clock(), members)
        if self._clock() >= self._measure_s:
            self._report_measurements(members)  # at once: waiting jobs may join members with a profile
        news = len(self._steady) > 1 and self._steady != self._reported_steady
        if self._times.is_due(self._clock(), members, news=news):
            self._report_speeds(status)

    def end(self, status: Mapping[str, Any]) -> None:
        """Report the last figures of a group that ends."""
        self._report_speeds(status)
        self._report_measurements(status.get("members", {}))

    def report_fault(self, status: Mapping[str, Any]) -> bool:
        """Report what ended the group, and which members may have caused it; return whether there is such a fault."""
        token = fault_token(status)
        if token is not None:
            try:
                set_comment(str(self._pilot), token)
            except GatewayError as error:
                log.warning("cannot report the fault; every member runs alone: %s", error)
        return token is not None

    def _report_speeds(self, status: Mapping[str, Any]) -> None:
        """Report each member's progress and times through the pilot job's comment."""
        report, reported = speeds_token(status, self._steady), True
        if report is not None and report != self._report:
            try:
                set_comment(str(self._pilot), report)
                self._report = report
            except GatewayError as error:
                reported = False
                log.warning("cannot report speeds: %s", error)
        if reported:
            self._reported_steady = self._steady
        self._times.tried(self._clock(), status.get("members", {}), reported=reported)

    def _report_measurements(self, members: Members) -> None:
        """Report in each member's own comment what its first script has measured, and again when that is surer."""
        for job_id, member in members.items():
            if not (figures := member.get("measured")):
                continue
            before, mark = self._measured.get(job_id), (member.get("sessions", 0), figures["at"])
            if before is not None and (before[0] != mark[0] or before[1] >= mark[1]):
                continue
            try:
                record = job_record(int(job_id))
                planned = tags.parse_plan(record.admin_comment)
                # A failure is told only where the model is not known yet.
                if "error" not in figures or planned is None or planned.estimated or planned.solo_iteration_s is None:
                    told = with_foreign_python(figures, sys.prefix)
                    set_comment(record.name, with_measured(record.comment, told))
            except SlurmUnreachableError as error:
                log.warning("job %s is measured, which cannot be reported now: %s", job_id, error)
                self._measure_s = self._clock() + _LEAST_GAP_S
                continue
            except GatewayError as error:
                log.warning("job %s is measured, which cannot be reported: %s", job_id, error)
            self._measured[job_id] = mark


_TURN_S: Final = 2.0
"""Time between two looks at the members; the monitor itself measures more rarely, but whenever one comes or goes."""


class NodeMonitor(threading.Thread):
    """A thread that measures the node's use and writes it beside the runtime's status file.

    The runtime may run under its members' Python, which need not have psutil and pynvml; a pilot job does. A failure
    here costs the pilot these figures only.
    """

    def __init__(self, status: Path, processes: MemberProcesses) -> None:
        super().__init__(name="node-monitor", daemon=True)
        self.latest: dict[str, Any] | None = None  # as JSON values; None before the second look
        self._status = status
        self._processes = processes
        self._ended = threading.Event()

    def close(self) -> None:
        """End the thread and remove the file."""
        self._ended.set()
        self.join(_TURN_S)
        use_file(self._status).unlink(missing_ok=True)

    def run(self) -> None:
        """Measure until `close`; NVML may take seconds to wake a GPU."""
        try:
            monitor = Monitor()
            for note in monitor.notes:
                log.info("the node's use: %s", note)
            while True:
                members, found = read_status(self._status)["members"], self._processes.found
                use = monitor.look(watched_processes(members, found))
                if use is not None and not self._ended.is_set():
                    self.latest = {**use.to_dict(), PLAIN: never_attached(members, found)}
                    atomic_json(use_file(self._status), {"updated": now_text(), **self.latest})
                if self._ended.wait(_TURN_S):
                    break
            monitor.close()
        except Exception:
            log.exception("the node's use is not reported any more")


def read_status(path: Path) -> dict[str, Any]:
    """Return the runtime's last status; without members until it first writes."""
    try:
        status = json_of(path.read_text())
    except (OSError, ValueError):
        status = None
    status = status if isinstance(status, dict) else {}
    members = status.get("members")
    known = members.items() if isinstance(members, dict) else ()
    return {**status, "members": {name: each for name, each in known if isinstance(each, dict)}}


def runs_as_thread(member: Mapping[str, Any]) -> bool:
    """Return whether a member's script is a thread of the runtime now."""
    return member.get("state") == "running" and member.get("isolation") == "thread"


def watched_processes(members: Members, found: Mapping[str, Collection[int]]) -> dict[str, set[int]]:
    """Return the processes by which each member's use is measured; members that are the runtime's threads have none."""
    watched = {name: set(pids) for name, pids in found.items()}
    for name, member in members.items():
        if runs_as_thread(member):
            watched.pop(name, None)
        elif member.get("state") == "running" and member.get("script_pid"):
            watched.setdefault(name, set()).add(member["script_pid"])
    return watched


def never_attached(members: Members, found: Collection[str]) -> list[str]:
    """Return the members that have processes here and no script in the runtime so far: they share without turns."""
    return sorted(name for name in found if not members.get(name, {}).get("sessions"))
