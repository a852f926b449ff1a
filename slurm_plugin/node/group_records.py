"""Groups by Slurm's records, for `muri top` on hosts without a runtime's status file."""

import os
from typing import Any, Final

from muri.profiler.records import STAGES, Use
from muri.slurm_plugin.gateway.commands import CommandGateway
from muri.slurm_plugin.private_files import ROOT_UID
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.comment_reports import (
    MemberReport,
    job_use,
    member_report,
    node_use,
    promise_broken,
    sharing_plainly,
)
from muri.slurm_plugin.records.comment_tags import Planned
from muri.slurm_plugin.records.roles import ManagedJob, Role, View, view_of

_STATES: Final = {JobState.PENDING: "waiting", JobState.COMPLETING: "ending"}


def running_groups() -> list[dict[str, Any]]:
    """Return the caller's groups, to root those of all users, in the form of a runtime's status."""
    return groups_in(view_of(CommandGateway().queue()), os.geteuid())


def groups_in(view: View, uid: int) -> list[dict[str, Any]]:
    """Return the groups whose pilot job runs and belongs to a user, to root those of all users."""
    pilots = [job for job in view.having(Role.PILOT) if job.state is JobState.RUNNING and uid in {ROOT_UID, job.uid}]
    return [_group(pilot, view) for pilot in pilots]


def _group(pilot: ManagedJob, view: View) -> dict[str, Any]:
    members = view.having(Role.MEMBER)
    own = [job for job in members if job.membership is not None and job.membership.pilot == pilot.job_id]
    told = pilot.reports.speeds
    reports = {job.job_id: member_report(told, job.job_id) for job in own}
    broken, plain = promise_broken(told), sharing_plainly(told)
    described = {
        str(job.job_id): _member(job, reports[job.job_id], broken=job.job_id in broken, plain=job.job_id in plain)
        for job in own
    }
    node = node_use(told)
    uses = {str(job.job_id): use for job in own if (use := job_use(told, job.job_id)) is not None}
    speeds = [member["speed"] for member in described.values() if member["speed"] is not None]
    disciplines = [report.discipline for report in reports.values() if report is not None and report.discipline]
    return {
        "pilot_job": str(pilot.job_id),
        "node": pilot.nodes,
        "discipline": disciplines[0] if disciplines else "plain" if pilot.mode == "plain" else "no speeds yet",
        "total_speed": sum(speeds) if speeds else None,
        "members": described,
        **({} if node is None else {"use": Use(node, uses).to_dict()}),
    }


def _member(job: ManagedJob, report: MemberReport | None, *, broken: bool, plain: bool) -> dict[str, Any]:
    planned = job.planned or Planned()
    member: dict[str, Any] = {
        "state": _STATES.get(job.state, "plain" if plain else "running"),
        "paused": job.state is JobState.SUSPENDED,
        "script": job.request.model or job.name,
        "predicted_speed": planned.speed,
        "promised_speed": (job.membership.min_speed or None) if job.membership is not None else None,
        "promise_broken": broken,
        "solo_iteration_s": None if planned.estimated else planned.solo_iteration_s,
        "speed": None,
    }
    if report is None:
        return member
    return member | {
        "iterations": report.iterations or 0,
        "iterations_per_s": 1 / report.iteration_s,
        "speed": report.speed_or_estimate(planned.solo_iteration_s),
        "share": _share(report),
    }


def _share(report: MemberReport) -> dict[str, float]:
    """The parts of an iteration, as shares of its time."""
    if not report.stage_s or not report.wait_s:
        return {}
    parts = dict(zip(STAGES, report.stage_s, strict=True)) | {"wait": sum(report.wait_s)}
    rest = max(0.0, report.iteration_s - sum(parts.values()))
    return {name: seconds / report.iteration_s for name, seconds in (parts | {"other": rest}).items()}
