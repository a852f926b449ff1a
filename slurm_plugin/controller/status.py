"""The last cycle's decisions about each job: in a file for the controller's user, and in one for each user.

The status directory holds `<uid>.json`, root's own, for every user with jobs, and `cycle.json`, which only says when
the last cycle finished. So no text of one user reaches another, whatever Slurm's PrivateData says.
"""

import errno
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from muri.errors import MuriError
from muri.files import write_atomically
from muri.policies.types import Plan, PlanJob, sentences
from muri.profiler.estimates import why_estimated
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.private_files import ROOT_UID, only_its_owner_writes, user_name
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.comment_reports import is_off_plan, job_use, member_report, promise_broken
from muri.slurm_plugin.records.comment_tags import Planned
from muri.slurm_plugin.records.roles import ManagedJob, Role, View
from muri.text import json_of

log = logging.getLogger("muri.controller")

_STATES = {Role.CANDIDATE: "waiting", Role.NOT_OURS: "waiting", Role.RELEASED: "alone", Role.USER_HELD: "user-held"}

STATUS_NAME: Final = "status.json"
"""In the state directory; its modification time tells when the last cycle finished."""

CYCLES_MISSED: Final = 3
"""A controller that has not finished a cycle for this many intervals is considered down."""


class StatusError(MuriError):
    """The status file is missing or unreadable."""


class NoStatusError(StatusError):
    """There is no status file here, or none for this user."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One job of Muri's."""

    job_id: int
    user: str
    name: str
    model: str  # Model name as given, "" when none
    # "waiting", "grouped" (given to a group, not started), "interleaved", "shared" (beside others without turns),
    # "alone" (running or queued by itself, maybe behind a pilot job) or "user-held"
    state: str
    slurm_state: str
    group: int | None = None  # Id of its pilot job, None when it has none
    partners: tuple[int, ...] = ()  # Job ids of the other members that still wait or run
    predicted_speed: float | None = None  # Speed that the plan expects, 1 = as fast as alone; None when alone
    # Speed measured by the runtime, None while there is none; see `is_speed_estimated`
    measured_speed: float | None = None
    # Whether measured and predicted speed differ by more than 20 %, of a model that was measured
    off_plan: bool = False
    solo_iteration_s: float | None = None  # Iteration time alone, from the profile; None when in no group
    iterations: int | None = None  # Iterations done in the group; None while unknown, like the rest
    stage_s: tuple[float, ...] = ()  # Seconds of an iteration in each stage
    wait_s: tuple[float, ...] = ()  # Seconds of an iteration waiting for each stage's resource
    discipline: str | None = None  # The discipline in force in the group
    reasons: tuple[str, ...] = ()  # Sentences for people, the last decision first
    estimated: bool = False  # Whether the plan rests on an estimate of its profile
    cpu_count: int = 0  # CPUs that it has or asks for now
    mem_per_node_mib: int = 0  # Memory on each node that it has or asks for now; 0 when not set
    # CPUs that it had asked for before Muri gave it others; None when it has its own request
    asked_cpu_count: int | None = None
    asked_mem_per_node_mib: int | None = None  # The same of memory
    # Of a job array's task how Slurm shows it, "12_3", or "12_[4-9]" for those that wait; "" for other jobs
    task: str = ""
    # Promised minimum speed in its group; a waiting job's request. None without one
    promised_speed: float | None = None
    # Job ids of the members of its group, itself included, that miss their promised speed
    promises_broken: tuple[int, ...] = ()
    opportunistic: bool = False  # Whether it only uses leftover resources
    # Its processes' use, as last measured by its pilot job's monitor: fields of `JobUse`. None before
    use: Mapping[str, float | None] | None = None
    # Expected duration over its user's statement; None where the statement is believed
    duration_factor: float | None = None

    @property
    def is_promise_broken(self) -> bool:
        """Whether it does not get the speed that it was promised."""
        return self.job_id in self.promises_broken

    @property
    def is_speed_estimated(self) -> bool:
        """Whether its measured speed rests on an estimate of its time alone."""
        return self.estimated or self.solo_iteration_s is None

    @property
    def shown_id(self) -> str:
        """Its id as Slurm's commands show and take it."""
        return self.task or str(self.job_id)


@dataclass(frozen=True, slots=True)
class Status:
    """One cycle's outcome."""

    cycle_s: float  # When the cycle ran, seconds since the epoch
    policy: str
    gateway: str  # "pyslurm" or "command"
    jobs: tuple[JobStatus, ...] = ()  # All Muri jobs that still wait or run
    errors: tuple[str, ...] = ()  # Refusals of Slurm
    slurm_calls: Mapping[str, int] = field(default_factory=dict)  # Calls to Slurm in the cycle, by kind


_STATUS: Final = TypeAdapter(Status)


def _with_report(job: JobStatus, view: View) -> JobStatus:
    """Add the reports in the comment of the member's pilot."""
    pilot = None if job.group is None else view.jobs.get(job.group)
    speeds = None if pilot is None else pilot.reports.speeds
    if not speeds:
        return job
    broken = tuple(job_id for job_id in promise_broken(speeds) if job_id in {job.job_id, *job.partners})
    use, report = job_use(speeds, job.job_id), member_report(speeds, job.job_id)
    job = replace(job, promises_broken=broken, use=None if use is None else asdict(use))
    if report is None:
        return job
    speed = report.speed_or_estimate(job.solo_iteration_s)
    return replace(
        job,
        measured_speed=speed,
        off_plan=not job.is_speed_estimated and is_off_plan(speed, job.predicted_speed),
        iterations=report.iterations,
        stage_s=report.stage_s,
        wait_s=report.wait_s,
        discipline=report.discipline,
    )


def status_of(
    view: View, plan: Plan | None, waiting: Mapping[int, str], notes: Mapping[int, tuple[str, ...]]
) -> tuple[JobStatus, ...]:
    """Describe every Muri job that still waits or runs. Groups, speeds and their reasons are in the jobs' own records.

    Args:
        view: The snapshot after the cycle's actions.
        plan: The cycle's plan, None when planning was skipped.
        waiting: Jobs that were not ready for planning, with the reason.
        notes: Older reasons by job id (excluded from groups, planned with an estimate).
    """
    reasons: dict[int, tuple[str, ...]] = {job_id: (why,) for job_id, why in waiting.items()}
    if plan is not None:
        reasons |= {item.job_id: sentences(item.reasons) for item in plan.waiting}
    members: dict[int, set[int]] = {}  # of each pilot job, those that have neither ended nor left it
    for job in view.having(Role.MEMBER):
        if job.membership is not None:
            members.setdefault(job.membership.pilot, set()).add(job.job_id)
    return tuple(
        _describe(job, view, members, reasons.get(job.job_id, ()) + notes.get(job.job_id, ()))
        for job in view.jobs.values()
        if job.state.is_active and job.role not in {Role.OTHER, Role.PILOT, Role.DRY_RUN}
    )


def _state_name(job: ManagedJob, pilot: ManagedJob | None, partners: tuple[int, ...]) -> str:
    if job.role in _STATES:
        return _STATES[job.role]
    if not partners and job.membership is not None:
        return "alone"
    if job.state is JobState.PENDING:
        return "grouped"
    return "shared" if pilot is not None and pilot.mode == "plain" else "interleaved"


def _describe(job: ManagedJob, view: View, members: Mapping[int, set[int]], reasons: tuple[str, ...]) -> JobStatus:
    membership = job.membership if job.role is Role.MEMBER else None
    pilot = None if membership is None else membership.pilot
    partners = () if pilot is None else tuple(sorted(members[pilot] - {job.job_id}))
    planned = (job.planned if job.role in {Role.MEMBER, Role.RELEASED} else None) or Planned()
    in_group = planned if pilot is not None else Planned()
    asked = None if job.given is None else job.given.original
    described = JobStatus(
        job_id=job.job_id,
        user=job.user,
        name=job.name,
        model=job.request.model,
        state=_state_name(job, None if pilot is None else view.jobs.get(pilot), partners),
        slurm_state=job.state.value,
        group=pilot,
        partners=partners,
        predicted_speed=in_group.speed,
        solo_iteration_s=in_group.solo_iteration_s,
        estimated=in_group.estimated,
        reasons=tuple(dict.fromkeys(planned.why + reasons)),
        cpu_count=job.cpu_count,
        mem_per_node_mib=job.mem_per_node_mib,
        asked_cpu_count=None if asked is None else asked.cpu_count,
        asked_mem_per_node_mib=None if asked is None else asked.mem_per_node_mib,
        task=job.name_in_slurm if job.array_tasks else "",
        opportunistic=job.request.opportunistic,
        promised_speed=(job.request.min_speed if membership is None else membership.min_speed) or None,
    )
    return _with_report(described, view)


def refresh(status: Status, view: View, reader: str | None = None) -> Status:
    """Update a cycle's status with Slurm's records of now: states, groups, speeds, new and ended jobs.

    Args:
        status: The cycle's decisions; of a cycle at time 0 where no controller has left any.
        view: Slurm's records.
        reader: The user whose jobs alone the status has; None if it has all.
    """
    known = {job.job_id: job for job in status.jobs}
    return replace(
        status,
        jobs=tuple(
            replace(
                fresh,
                reasons=_reasons(old := known.get(fresh.job_id), fresh, view, status, reader),
                duration_factor=None if old is None else old.duration_factor,
            )
            for fresh in sorted(status_of(view, None, {}, {}), key=_place)
        ),
    )


def _place(job: JobStatus) -> list[int]:
    """Order by the shown id: tasks of an array get job ids of their own in any order."""
    return [int(number) for number in re.findall(r"[0-9]+", job.shown_id)[:2]]


def _reasons(
    old: JobStatus | None, fresh: JobStatus, view: View, status: Status, reader: str | None
) -> tuple[str, ...]:
    """The cycle's reasons as long as they hold, else those in the job's own record."""
    if reader not in {None, fresh.user}:
        return (f"only {fresh.user} and administrators may see why",)
    if old is not None and old.group == fresh.group:
        return old.reasons
    if fresh.reasons or old is not None:
        return fresh.reasons or (old.reasons if old is not None else ())
    if fresh.state != "waiting":
        return ("released before a cycle",)
    if status.cycle_s:
        return ("no controller cycle has seen it yet",)
    job = view.jobs[fresh.job_id]  # on a machine without a controller
    gate = ": Muri keeps it waiting until its turn comes" if job.gated else ""
    where = "the controller keeps its reasons on its own machine, usually slurmctld's (`scontrol ping` names that)"
    return (
        f"Slurm's reason is {job.reason or 'not set'}{gate}",
        f"{where}: `muri explain {job.job_id}` there tells more",
    )


_encode: Final = json.JSONEncoder(sort_keys=True).encode
_FIELDS: Final = tuple((each.name, each.default) for each in fields(JobStatus))


def lines_of(jobs: Iterable[JobStatus]) -> dict[int, str]:
    """Return each job's line in a status file, by job id: JSON without fields that have their default."""
    return {
        job.job_id: _encode({name: value for name, default in _FIELDS if (value := getattr(job, name)) != default})
        for job in jobs
    }


def with_lines(status: Status, lines: Iterable[str]) -> str:
    """Return the text of a status file with these jobs' lines instead of the status's own."""
    about = {each.name: getattr(status, each.name) for each in fields(Status) if each.name != "jobs"}
    return '{"jobs": [\n' + ",\n".join(lines) + f"],\n{_encode(about)[1:]}\n"


def write_status(path: Path, status: Status, lines: Mapping[int, str] | None = None) -> None:
    """Replace the status file in one step; only its owner may read it. `lines` are its jobs', if made already."""
    lines = lines_of(status.jobs) if lines is None else lines
    write_atomically(path, with_lines(status, lines.values()), 0o600)


def read_status(path: Path) -> Status:
    """Read the status file; a StatusError says that there is none, or why it cannot be read."""
    try:
        # Not by validate_json: it refuses the whole file for one byte of a job's name that could not be decoded.
        return _STATUS.validate_python(json_of(path.read_bytes()))
    except FileNotFoundError as error:
        raise NoStatusError(f"there is no {path}: no controller cycle has run here") from error
    except PermissionError as error:
        raise NoStatusError(f"{path} may not be read") from error
    except (OSError, ValueError) as error:
        raise StatusError(f"cannot read {path}: {error}") from error


def age_s(path: Path, now_s: float) -> float | None:
    """Return the seconds since the last finished cycle, None when there was none."""
    try:
        return now_s - path.stat().st_mtime
    except OSError:
        return None


def notes_of(jobs: Sequence[PlanJob], plan: Plan) -> dict[int, str]:
    """Return why waiting jobs are planned with an estimate, by job id; a start has that among its own reasons."""
    waiting = {item.job_id for item in plan.waiting}
    reasons = {job.job_id: why_estimated(job.profile) for job in jobs if job.profile is not None}
    return {job_id: why for job_id, why in reasons.items() if why and job_id in waiting}


CYCLE_NAME: Final = "cycle.json"


def report(config: Config, status: Status, view: View) -> None:
    """Write a cycle's status for the controller's user, and each user's part for that user, as far as possible."""
    lines = lines_of(status.jobs)
    write_status(config.state_dir / STATUS_NAME, status, lines)
    try:
        _publish(config.status_dir, status, lines, view)
    except OSError as error:
        log.warning(
            "users cannot see why their jobs wait: cannot write %s: %s. See `muri doctor`",
            config.status_dir, error.strerror,
        )  # fmt: skip


def _publish(folder: Path, status: Status, lines: Mapping[int, str], view: View) -> None:
    """Replace the files of users that have jobs, and remove those of users that have none.

    Raises:
        OSError: The directory or a file cannot be written, or other users may write to the directory.
    """
    for path in (folder.parent, folder):
        if not path.exists():
            path.mkdir()
            path.chmod(0o755)
    facts = folder.lstat()
    if facts.st_uid != os.geteuid() or not only_its_owner_writes(facts):
        raise NotADirectoryError(errno.ENOTDIR, "it must be a directory that only the controller may write")
    about = replace(status, errors=(), slurm_calls={})  # Slurm's refusals may quote any user
    own: dict[int, list[str]] = {}
    for job_id, line in lines.items():
        if job_id in view.jobs:
            own.setdefault(view.jobs[job_id].uid, []).append(line)
    for uid, users in own.items():
        write_atomically(folder / f"{uid}.json", with_lines(about, users), 0o400, reader=uid)
    for path in folder.glob("*.json"):
        if path.stem.isdecimal() and int(path.stem) not in own:
            path.unlink()
    write_atomically(folder / CYCLE_NAME, with_lines(about, ()), 0o644)  # last: its time says that all is written


def latest_status(config: Config) -> tuple[Status, str | None]:
    """Return the last cycle's status, as far as this user may see it, and the name of the user whose jobs it has.

    That is None where it has all jobs. Without a controller's files, such as on a login host, the status is empty and
    of a cycle at time 0.

    Raises:
        StatusError: A status file is damaged.
    """
    try:
        return read_status(config.state_dir / STATUS_NAME), None
    except NoStatusError:
        reader = None if os.geteuid() == ROOT_UID else user_name(os.geteuid())
    for name in (f"{os.geteuid()}.json", CYCLE_NAME):
        try:
            return read_status(config.status_dir / name), reader
        except NoStatusError:
            continue
    return Status(0.0, "", ""), reader


def cycle_age_s(config: Config, now_s: float) -> float | None:
    """Return the seconds since the last finished cycle, for any user; None if unknown here."""
    ages = (age_s(path, now_s) for path in (config.state_dir / STATUS_NAME, config.status_dir / CYCLE_NAME))
    return next((age for age in ages if age is not None), None)
