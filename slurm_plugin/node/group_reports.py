"""What a pilot job tells the controller of its members, through jobs' comments: speeds rarely, news promptly."""

import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from muri.clock import Clock
from muri.slurm_plugin.gateway.base import GatewayError, SlurmUnreachableError
from muri.slurm_plugin.node.pauses import growing_pauses
from muri.slurm_plugin.node.slurm_calls import JobRecord, job_record, set_comment
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.comment_reports import (
    DIFFERS_BY,
    fault_token,
    iteration_times_s,
    speeds_token,
    with_foreign_python,
    with_measured,
)

log = logging.getLogger("muri.pilot")

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

    Args:
        telemetry_s: The longest time between two reports.
        job_id: The pilot job.
    """

    def __init__(self, telemetry_s: float, job_id: int) -> None:
        self._telemetry_s = telemetry_s
        self._job_id = job_id
        self._gap_s = min(_LEAST_GAP_S, telemetry_s)
        self._sessions = -1
        self._pauses: Iterator[float] = iter(())
        self._next_s = self._tried_s = 0.0
        self._failed = False
        self._times_s: dict[str, float] = {}
        self._broken: frozenset[str] = frozenset()

    def is_due(self, now_s: float, members: Mapping[str, Any], *, news: bool = False) -> bool:
        """Return whether the members' speeds are to be reported now.

        Args:
            now_s: A clock.
            members: The members' part of the runtime's status.
            news: Whether the last report told of other company.
        """
        sessions = sum(member.get("sessions", 0) for member in members.values())
        if sessions != self._sessions:
            self._sessions = sessions
            self._pauses = growing_pauses(self._gap_s, self._telemetry_s, self._job_id)
            self._next_s = now_s + next(self._pauses)
        has_paused = now_s - self._tried_s >= self._gap_s
        if self._failed:
            return has_paused
        news = has_paused and (news or self._has_changed(members))
        return news or now_s >= self._next_s or _broken(members) != self._broken

    def tried(self, now_s: float, members: Mapping[str, Any], *, told: bool) -> None:
        """Take note that the speeds were reported, or that Slurm did not take the report."""
        self._tried_s, self._failed = now_s, not told
        if told:
            self._next_s = now_s + next(self._pauses)
            self._times_s, self._broken = iteration_times_s(members), _broken(members)

    def _has_changed(self, members: Mapping[str, Any]) -> bool:
        before_s = self._times_s
        return any(
            abs(time_s - before_s[name]) > DIFFERS_BY * before_s[name]
            for name, time_s in iteration_times_s(members).items()
            if name in before_s and members[name].get("state") == "running"
        )


class Company:
    """Says who is at work beside whom for long enough that the measured speeds tell of just this company. Pure."""

    def __init__(self) -> None:
        self._at_work: frozenset[str] = frozenset()
        self._since_s = 0.0

    def steady(self, now_s: float, members: Mapping[str, Any]) -> frozenset[str]:
        """Return the members at work; empty where one of them came or went while their speeds were measured.

        Args:
            now_s: A clock; each look has to be noted, for what happens between two of them is not seen.
            members: The members' part of the runtime's status.
        """
        at_work = frozenset(name for name, each in members.items() if _is_at_work(each))
        if at_work != self._at_work:
            self._at_work, self._since_s = at_work, now_s
        slowest_s = max((iteration_times_s(members).get(name, 0.0) for name in at_work), default=0.0)
        measured_s = max(_MEASURED_S, _MEASURED_ITERATIONS * slowest_s)
        return at_work if now_s - self._since_s >= measured_s else frozenset()


def _is_at_work(member: Mapping[str, Any]) -> bool:
    return member.get("state") == "running" and not member.get("paused")


def _broken(members: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(name for name, member in members.items() if member.get("promise_broken"))


class GroupReports:
    """Reports of one pilot job.

    Args:
        pilot: The pilot job.
        telemetry_s: The longest time between two reports of speeds.
        clock: Tells the time.
    """

    def __init__(self, pilot: int, telemetry_s: float, clock: Clock) -> None:
        self._pilot = pilot
        self._clock = clock
        self._times = ReportTimes(telemetry_s, pilot)
        self._company = Company()
        self._steady: frozenset[str] = frozenset()
        self._told_steady: frozenset[str] = frozenset()
        self._report: str | None = None
        self._measured: dict[str, tuple[int, float]] = {}
        self._measure_s = clock()

    def look(self, status: Mapping[str, Any]) -> None:
        """Tell what is due of the runtime's status."""
        members = status.get("members", {})
        self._steady = self._company.steady(self._clock(), members)
        if self._clock() >= self._measure_s:
            self._tell_measurements(members)  # at once: waiting jobs may join whom the plan knows
        news = len(self._steady) > 1 and self._steady != self._told_steady
        if self._times.is_due(self._clock(), members, news=news):
            self._tell_speeds(status)

    def end(self, status: Mapping[str, Any]) -> None:
        """Tell the last figures of a group that ends."""
        self._tell_speeds(status)
        self._tell_measurements(status.get("members", {}))

    def tell_fault(self, status: Mapping[str, Any]) -> bool:
        """Tell which members may have broken the GPU's context; return whether it is broken."""
        token = fault_token(status)
        if token is not None:
            try:
                set_comment(str(self._pilot), token)
            except GatewayError as error:
                log.warning("cannot report the fault; every member runs alone: %s", error)
        return token is not None

    def _tell_speeds(self, status: Mapping[str, Any]) -> None:
        """Tell each member's progress and times through the pilot job's comment."""
        report, told = speeds_token(status, self._steady), True
        if report is not None and report != self._report:
            try:
                set_comment(str(self._pilot), report)
                self._report = report
            except GatewayError as error:
                told = False
                log.warning("cannot report speeds: %s", error)
        self._told_steady = self._steady if told else self._told_steady
        self._times.tried(self._clock(), status.get("members", {}), told=told)

    def _tell_measurements(self, members: Mapping[str, Any]) -> None:
        """Tell of each member's first script what its iterations say, and again when that is surer."""
        for job_id, member in members.items():
            found = member.get("measured")
            if not found:
                continue
            told, this = self._measured.get(job_id), (member.get("sessions", 0), found["at"])
            if told is None or (told[0] == this[0] and told[1] < this[1]):
                self._tell_measured(job_id, found, this)

    def _tell_measured(self, job_id: str, found: Mapping[str, Any], this: tuple[int, float]) -> None:
        """Tell what a member's iterations say of its model through that job's own comment; `this` is its mark."""
        try:
            told = found if "error" in found else with_foreign_python(found, sys.prefix)
            record = job_record(int(job_id))
            if "error" not in found or _is_estimated(record):  # of a known model a failure says nothing new
                set_comment(record.name, with_measured(record.comment, told))
        except SlurmUnreachableError as error:
            log.warning("job %s is measured, which cannot be told now: %s", job_id, error)
            self._measure_s = self._clock() + _LEAST_GAP_S
            return
        except GatewayError as error:
            log.warning("job %s is measured, which cannot be told: %s", job_id, error)
        self._measured[job_id] = this


def _is_estimated(record: JobRecord) -> bool:
    """Whether a member is planned with an estimate, or with nothing at all."""
    planned = tags.parse_plan(record.admin_comment)
    return planned is None or planned.estimated or planned.solo_iteration_s is None
