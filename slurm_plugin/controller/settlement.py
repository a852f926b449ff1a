"""Settles the accounts of members that have ended: counts them, and writes a report into each one's AdminComment.

slurmctld refuses to change a job that has ended, so the word goes to slurmdbd (`sacctmgr modify job`): one call for
each member, after everything else of the cycle, and again in the next cycle where it fails. Nothing waits for it.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from pydantic import TypeAdapter, ValidationError

from muri.clock import MACHINE_CLOCK, Clock
from muri.slurm_plugin.controller.counters import Counters
from muri.slurm_plugin.execute.apply import StopFlag
from muri.slurm_plugin.gateway.accounting import Accounting, NoAccountingError
from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.planning.history import (
    GroupRun,
    MemberRun,
    Standing,
    forgotten,
    looked_up,
    updated,
    with_profiles,
)
from muri.slurm_plugin.records.job_report import with_report
from muri.slurm_plugin.records.journal import GROUP_RUN, Journal
from muri.slurm_plugin.records.usage import Run

log = logging.getLogger("muri.controller")

_GROUP: Final = TypeAdapter(GroupRun)

_GIVE_UP_S: Final = 86400.0

_NO_RECORD_FOR_S: Final = 1800.0
"""So long after a job's end its record may still be on its way to the database."""

_WRITING_S: Final = 30.0
"""Most seconds of a cycle for writing reports; the rest follows in the next one."""


class Settlement:
    """The open accounts of groups, kept in the journal.

    Args:
        journal: Where they are kept between cycles.
        accounting: Slurm's accounts.
        stop: Ends the writing between two calls.
        clock: Tells the time.
    """

    def __init__(self, journal: Journal, accounting: Accounting, stop: StopFlag, clock: Clock = MACHINE_CLOCK) -> None:
        self._journal = journal
        self._accounting = accounting
        self._stop = stop
        self._clock = clock

    def look(self, cycle: CycleInput, counters: Counters) -> dict[int, GroupRun]:
        """Bring the open accounts up to what Slurm shows, and count what has ended since the last cycle."""
        view, now_s, telemetry_s = cycle.view, cycle.now_s, cycle.config.tuning.telemetry_s
        before = _read(self._journal.facts(GROUP_RUN))
        runs = with_profiles(
            updated(before, view, self._journal.intents(), now_s), cycle.view, cycle.knowledge, cycle.node_index
        )
        lost = forgotten({pilot: runs[pilot] for pilot in before}, view)
        records = self._records_of(lost) if lost else None
        if records is not None:
            runs = looked_up(runs, lost, records, now_s)
        for pilot, run in runs.items():
            if run.end and (pilot not in before or not before[pilot].end):
                counters.add("groups_ended", (run.end,))
            for member in run.due(now_s, telemetry_s):
                runs[pilot] = _count(runs[pilot], member, counters, now_s)
        return runs

    def _records_of(self, jobs: set[int]) -> list[Run] | None:
        """Look jobs up that slurmctld has forgotten; None when that has to wait for the next cycle."""
        try:
            return self._accounting.runs_of(jobs)
        except NoAccountingError:
            return []
        except GatewayError as error:
            log.warning("jobs that slurmctld has forgotten are looked up in the next cycle: %s", error)
            return None

    def save(self, runs: Mapping[int, GroupRun], counters: Counters) -> None:
        """Write accounts and counters in one step: nothing is counted twice."""
        open_runs = {str(pilot): _GROUP.dump_python(run, mode="json") for pilot, run in runs.items() if not run.is_over}
        self._journal.replace_facts({GROUP_RUN: open_runs, **counters.facts()})

    def write(self, runs: Mapping[int, GroupRun], now_s: float) -> dict[int, GroupRun]:
        """Write the reports of members that were counted; return the accounts with what is left to do."""
        left = dict(runs)
        end_s = self._clock() + _WRITING_S
        waiting = ((run.pilot, each) for run in runs.values() for each in run.members)
        for pilot, member in waiting:
            if member.standing is not Standing.COUNTED:
                continue
            if self._stop.is_set() or self._clock() > end_s:
                break
            try:
                closed = self._write(member, now_s)
            except GatewayError as error:
                log.warning("reports of ended jobs wait for the next cycle: %s", error)
                break
            if closed:
                left[pilot] = left[pilot].with_member(replace(member, standing=Standing.CLOSED))
        return left

    def _write(self, member: MemberRun, now_s: float) -> bool:
        """Write one report; return whether nothing is left to do for it."""
        age_s = now_s - member.end_s
        try:
            self._accounting.set_admin_comment(member.job_id, member.admin_comment, member.name)
        except NoAccountingError:
            return True
        except NoSuchJobError:
            return age_s > _NO_RECORD_FOR_S
        except GatewayError:
            if age_s > _GIVE_UP_S:
                log.warning("job %d: its report is given up", member.job_id)
                return True
            raise
        return True


def _count(run: GroupRun, member: MemberRun, counters: Counters, now_s: float) -> GroupRun:
    report = member.report(run, run.gpu_s(now_s).get(member.job_id, 0.0))
    shared = bool(report.partners)
    counters.add("members_ended", (report.basis or "unknown" if shared else "unshared",))
    if shared and report.is_counted:
        counters.add("member_gpu_seconds_alone", (), report.alone_gpu_s)
        counters.add("member_gpu_seconds_shared", (), report.gpu_s)
    comment = with_report(member.admin_comment, report)
    return run.with_member(replace(member, admin_comment=comment, standing=Standing.COUNTED))


def _read(facts: Mapping[str, object]) -> dict[int, GroupRun]:
    """Read the journal's open accounts; a damaged one is logged and given up."""
    found: dict[int, GroupRun] = {}
    for subject, value in facts.items():
        try:
            found[int(subject)] = _GROUP.validate_python(value)
        except (ValidationError, ValueError):
            log.exception("the accounts of the group of pilot job %r cannot be read and are left out", subject)
    return found
