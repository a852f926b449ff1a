"""What faults do besides those of the controller's calls: to its process and files, to Slurm, to jobs, by people."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Final

from muri.slurm_plugin.execute.gate import drain
from muri.slurm_plugin.gateway.base import SlurmUnreachableError, slurm_error
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobState, Reservation
from muri.slurm_plugin.records.roles import REQUEUED_HELD, Role, is_behind_license, is_lifted, without_gate
from muri_lab.twin.programs import DryRun, Placeholder, TrainingScript
from muri_lab.twin.stage import CALM_AFTER_S, Stage
from muri_lab.twin.story import Fault

_LEAST_LIMIT_S: Final = 3600
_MOST_LIMIT_S: Final = 7200  # Between these no job is ended by a limit, and none is over one of the site's


def _chosen(jobs: list[Job], fault: Fault) -> Job | None:
    return jobs[fault.which % len(jobs)] if jobs else None


def _controller_away(stage: Stage, fault: Fault) -> str:
    stage.away_until_s = stage.twin.time.now_s + 120 + 480 * fault.amount
    stage.end_process()
    stage.watch.begin_anew()
    return f"until {stage.away_until_s - stage.twin.begun_s:.0f} s"


def _clock_step(stage: Stage, fault: Fault) -> str:
    gateway = stage.twin.gateway

    def step(offset_s: float) -> None:
        gateway.clock_offset_s = offset_s
        stage.note_change()  # no snapshot tells the time of another clock

    step((fault.amount - 0.5) * 7200)
    stage.twin.time.after(150.0, lambda: step(0.0))
    stage.watch.begin_anew()
    return f"{gateway.clock_offset_s:+.0f} s"


def _slurmctld_away(stage: Stage, fault: Fault) -> str:
    slurm = stage.twin.slurm
    if slurm.away:
        return ""
    long = fault.kind.endswith("long")
    seconds = 200 + 400 * fault.amount if long else 2 + 20 * fault.amount
    slurm.go_away()
    stage.twin.time.after(seconds, slurm.come_back)
    stage.watch.begin_anew()
    return f"for {seconds:.0f} s"


def _node(stage: Stage, fault: Fault) -> str:
    slurm = stage.twin.slurm
    name = sorted(slurm.nodes)[fault.which % len(slurm.nodes)]
    if slurm.away:
        return ""
    if fault.kind == "node failed":
        slurm.fail_node(name)
    else:
        slurm.set_node(name, usable=False, state="DRAIN")
    stage.twin.time.after(60 + 240 * fault.amount, partial(slurm.set_node, name, usable=True, state="IDLE"))
    return name


def _maintenance(stage: Stage, fault: Fault) -> str:
    slurm, now_s = stage.twin.slurm, stage.twin.time.now_s
    name = sorted(slurm.nodes)[fault.which % len(slurm.nodes)]
    slurm.reservations += (Reservation(f"maint{fault.which}", name, now_s + 30, now_s + 330, ("MAINT",)),)
    stage.twin.time.after(331, slurm.look_soon)
    return name


def _placeholder(stage: Stage, fault: Fault) -> str:
    pilot = _chosen(stage.own_jobs(Role.PILOT), fault)
    if pilot is None or stage.twin.slurm.away:
        return ""
    program = stage.twin.slurm.ledger[pilot.job_id].program
    if fault.kind == "placeholder cancelled":
        stage.twin.slurm.cancel(pilot.job_id, "user")
    elif pilot.state is not JobState.RUNNING:
        return ""
    elif fault.kind == "runtime killed" and isinstance(program, Placeholder):
        program.crash()
    else:
        program.kill()
        run = stage.twin.slurm.ledger[pilot.job_id].run
        if run is not None:
            stage.twin.slurm.exit(run, 137)
    return f"job {pilot.job_id}"


def _script(stage: Stage, fault: Fault) -> str:
    members = [
        job for job in stage.users_jobs(JobState.RUNNING)
        if fault.kind == "muri run killed" or tags.parse_state(job.admin_comment) is not None
    ]  # fmt: skip
    job = _chosen(members, fault)
    if job is None:
        return ""
    program = stage.twin.slurm.ledger[job.job_id].program
    if not isinstance(program, TrainingScript) or not stage.twin.slurm.is_under_way_of(job.job_id):
        return ""
    stage.watch.of(job.job_id).crashed = True
    program.crash()
    return f"job {job.job_id}"


def _dry_run(stage: Stage, fault: Fault) -> str:
    run = _chosen(stage.own_jobs(Role.DRY_RUN), fault)
    if run is None or run.state is not JobState.RUNNING or stage.twin.slurm.away:
        return ""
    program = stage.twin.slurm.ledger[run.job_id].program
    if isinstance(program, DryRun) and program.run is not None:
        program.kill()
        stage.twin.slurm.exit(program.run, 1)
    return f"job {run.job_id}"


def _people(stage: Stage, fault: Fault) -> str:
    """Let a user or an administrator do something to a job."""
    if stage.twin.slurm.away:
        return ""
    job = _chosen(_reachable(stage, fault.kind), fault)
    if job is None:
        return ""
    _PEOPLE[fault.kind](stage, job, fault)
    return f"job {job.job_id}"


def _reachable(stage: Stage, kind: str) -> list[Job]:
    """Return the jobs to which an actor can do that."""
    states, is_meant = _WHOM[kind]
    return [job for job in stage.users_jobs(*states) if is_meant(stage, job)]


def _would_look_like_muris(stage: Stage, job: Job) -> bool:
    """Return whether a hold on a job looks like Muri's own, which was lifted after the last look at the queue.

    Its user has released it, or a controller that did not hear of its call's outcome.
    """
    return is_lifted(job) and stage.twin.slurm.ledger[job.job_id].released_s >= stage.looked_s


def _has_own_request(job: Job) -> bool:
    return not tags.is_member(job.admin_comment) and tags.token(job.admin_comment, tags.GIVEN_PREFIX) is None


def _may_be_requeued_held(stage: Stage, job: Job) -> bool:
    """Whether a hold of an administrator who requeues a job can be told from that of a member that puts itself back."""
    return job.can_requeue and not (tags.is_member(job.admin_comment) and stage.twin.slurm.site.conf.gate == "hold")


def _may_be_changed(stage: Stage, job: Job) -> bool:
    return tags.is_member(job.admin_comment) or (job.state is JobState.PENDING and _has_own_request(job))


_WAITING: Final = (JobState.PENDING,)
_AT_WORK: Final = (JobState.RUNNING,)
_ANY: Final = (*_WAITING, *_AT_WORK)

_WHOM: Final[dict[str, tuple[tuple[JobState, ...], Callable[[Stage, Job], bool]]]] = {
    "user cancels": (_ANY, lambda stage, job: True),
    "user holds": (_WAITING, lambda stage, job: not _would_look_like_muris(stage, job)),
    "user releases": (_WAITING, lambda stage, job: job.held),
    "user requeues": (_AT_WORK, lambda stage, job: job.can_requeue),
    "user changes request": (_ANY, _may_be_changed),
    "user takes license off": (
        _WAITING, lambda stage, job: _has_own_request(job) and without_gate(job.licenses) != job.licenses
    ),
    "user forges comment": (_ANY, lambda stage, job: True),
    "administrator holds": (_WAITING, lambda stage, job: True),
    "administrator requeues and holds": (_AT_WORK, _may_be_requeued_held),
    "administrator changes limit": (_ANY, _may_be_changed),
}  # fmt: skip
"""The jobs, by state, that an actor can do something to."""


def _cancels(stage: Stage, job: Job, fault: Fault) -> None:
    stage.cancel_as_user(job.job_id)


def _holds(stage: Stage, job: Job, fault: Fault) -> None:
    stage.note_change()
    _note_lost_gate(stage, job)
    stage.twin.slurm.hold(job.job_id, "user" if fault.kind == "user holds" else "admin")


def _releases(stage: Stage, job: Job, fault: Fault) -> None:
    stage.twin.slurm.release(job.job_id, "user")


def _note_lost_gate(stage: Stage, job: Job) -> None:
    """Note that neither tags nor license tell others' hold on a job from Muri's: its tags were cut off."""
    if job.job_id in stage.watch.tampered and not is_behind_license(job):
        stage.watch.tampered[job.job_id] = False


def _requeues(stage: Stage, job: Job, fault: Fault) -> None:
    stage.note_change()
    _note_lost_gate(stage, job)
    by = "user" if fault.kind == "user requeues" else "admin"
    stage.twin.slurm.requeue(job.job_id, by, held=by == "admin")


def _forges(stage: Stage, job: Job, fault: Fault) -> None:
    text = _FORGED[fault.which % len(_FORGED)]
    stage.twin.slurm.set_comment(job.job_id, text.replace("JOB", str(job.job_id)))


def _changes(stage: Stage, job: Job, fault: Fault) -> None:
    stage.note_change()
    if tags.is_member(job.admin_comment):
        # Slurm shows the request that Muri has made; what anybody may want of that is another time limit.
        limit_s = job.time_limit_s - 600 if fault.kind == "user changes request" else job.time_limit_s + 600
        if not _LEAST_LIMIT_S <= limit_s <= _MOST_LIMIT_S:
            raise slurm_error(f"change job {job.job_id}", "Requested time limit is invalid")
        stage.twin.slurm.update_by_owner(job.job_id, time_limit_s=limit_s)
    elif fault.kind == "administrator changes limit" or fault.amount < 0.5:
        stage.twin.slurm.update_by_owner(job.job_id, time_limit_s=max(600, job.time_limit_s - 600))
    else:
        stage.twin.slurm.update_by_owner(job.job_id, cpus_per_task=1, cpu_count=max(1, job.gpu_count))


def _takes_license_off(stage: Stage, job: Job, fault: Fault) -> None:
    stage.note_change()
    stage.twin.slurm.update_by_owner(job.job_id, licenses=without_gate(job.licenses))
    _note_lost_gate(stage, stage.twin.slurm.jobs[job.job_id])


_PEOPLE: Final[dict[str, Callable[[Stage, Job, Fault], None]]] = {
    "user cancels": _cancels,
    "user holds": _holds,
    "user releases": _releases,
    "user requeues": _requeues,
    "user changes request": _changes,
    "user takes license off": _takes_license_off,
    "user forges comment": _forges,
    "administrator holds": _holds,
    "administrator requeues and holds": _requeues,
    "administrator changes limit": _changes,
}

_FORGED: Final = (
    'muri-out-of-memory:0.3 muri-stopped:0 muri-checkpoint:0',
    'muri-speed:{"JOB":{"n":1,"t":1e-9,"s":[1,1,1,1],"w":[0,0,0,0]}}',
    'muri-profile:{"token":"000000000001","load_s":9,"preprocess_s":9,"propagate_s":9,"synchronize_s":9,"iteration_s":36}',
    'muri-fault:{"cause":"x","culprits":[1,2,3,4]}',
    "muri-pilot:000000000001:1,2,3 muri-state:{}",
    "{" * 400,
)  # fmt: skip


def _files(stage: Stage, fault: Fault) -> str:
    state = stage.twin.config.state_dir
    name = "profiles.db" if "store" in fault.kind else "journal.db"
    stage.end_process()
    paths = sorted(state.glob(f"{name}*"))
    if not paths:
        return ""
    for path in paths:
        if fault.kind.endswith("lost"):
            path.unlink()
        else:
            content = bytearray(path.read_bytes())
            cut = int(len(content) * fault.amount)
            content[cut : cut + 4096] = bytes((fault.which + index) % 251 for index in range(4096))
            path.write_bytes(bytes(content))
    stage.watch.journal_lost |= name == "journal.db"
    stage.watch.begin_anew()
    return name


def _disk_full(stage: Stage, fault: Fault) -> str:
    """Let all writes into the journal fail for a while."""
    stage.full_until_s = min(stage.twin.time.now_s + 900 * fault.amount, stage.twin.begun_s + CALM_AFTER_S)
    stage.end_process()
    stage.watch.begin_anew()
    return f"until {stage.full_until_s - stage.twin.begun_s:.0f} s"


def _truncated(stage: Stage, fault: Fault) -> str:
    job = _chosen([job for job in stage.users_jobs(JobState.PENDING, JobState.RUNNING) if job.admin_comment], fault)
    if job is None or stage.twin.slurm.away:
        return ""
    cut = int(len(job.admin_comment) * fault.amount)
    # A member that requeues itself is held, too; only its tags tell that from an administrator's hold.
    is_told = is_behind_license(job) and job.reason != REQUEUED_HELD
    stage.watch.tampered[job.job_id] = is_told and stage.watch.tampered.get(job.job_id, True)
    stage.watch.of(job.job_id).waiting_since_s = None
    stage.twin.slurm.set_admin_comment(job.job_id, job.admin_comment[:cut])
    return f"job {job.job_id} after {cut} characters"


def _drained(stage: Stage, fault: Fault) -> str:
    """`muri drain`, with or without the controller coming back afterwards."""
    stage.end_process()
    seconds = 300.0
    stage.away_until_s = stage.twin.time.now_s + seconds
    stage.removed = fault.kind == "removed"
    stage.watch.begin_anew()
    if stage.removed:
        stage.twin.nodes.muri_installed = False
    stage.twin.time.after(1.0, lambda: _drain_on(stage))
    return "for good" if stage.removed else f"for {seconds:.0f} s"


def _drain_on(stage: Stage) -> None:
    """As `drain_until_over`, until it is over or the controller is back."""
    again = True
    if not stage.twin.slurm.away:
        gateway = stage.twin.gateway.at_once()
        with contextlib.suppress(SlurmUnreachableError):
            again = not drain(gateway, gateway.queue).is_over
    if again and (stage.removed or stage.twin.time.now_s < stage.away_until_s):
        stage.twin.time.after(20.0, lambda: _drain_on(stage))


def _upgraded(stage: Stage, fault: Fault) -> str:
    """A new version, with another policy."""
    stage.end_process()
    policy = ("muri-s", "muri-l", "muri-jct", "sjf-bsbf")[fault.which % 4]
    stage.twin.config = stage.twin.config.model_copy(update={"policy": policy})
    return policy


BETWEEN_CYCLES: Final = frozenset({
    "controller away for long", "journal lost", "journal damaged", "profile store lost", "profile store damaged",
    "disk full", "drained", "removed", "upgraded",
})  # fmt: skip
"""What happens to the controller's process or files while no cycle runs."""

ACTS: Final[dict[str, Callable[[Stage, Fault], str]]] = {
    "controller away for long": _controller_away,
    "clock step": _clock_step,
    "slurmctld restarted": _slurmctld_away,
    "slurmctld away for long": _slurmctld_away,
    "node drained": _node,
    "node failed": _node,
    "maintenance reservation": _maintenance,
    "placeholder cancelled": _placeholder,
    "placeholder killed": _placeholder,
    "runtime killed": _placeholder,
    "member killed": _script,
    "muri run killed": _script,
    "dry run killed": _dry_run,
    **dict.fromkeys(_PEOPLE, _people),
    **dict.fromkeys(("journal lost", "journal damaged", "profile store lost", "profile store damaged"), _files),
    "disk full": _disk_full,
    "AdminComment truncated": _truncated,
    "drained": _drained,
    "removed": _drained,
    "upgraded": _upgraded,
}  # fmt: skip
"""Each lets a fault happen and returns its description, or "" without a target."""
