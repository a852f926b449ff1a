"""Invariants that hold whatever goes wrong, watched at every event of a virtual cluster."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from muri.slurm_plugin.planning.gathered import is_let_go
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.roles import Role, is_behind_license, read_job, without_gate
from muri_lab.twin.limits import why_over_limits
from muri_lab.twin.programs import TrainingScript
from muri_lab.twin.twin import Course, Twin

_OWN: Final = (
    "gpu_count", "gpu_request", "node_count", "cpu_count", "cpus_per_task", "mem_per_node_mib", "mem_per_cpu_mib",
    "required_nodes", "excluded_nodes", "features", "time_limit_s", "partition", "account", "qos", "reservation",
    "uid", "user", "can_requeue",
)  # fmt: skip
"""What of a request Muri must give back."""

_NEVER_GIVEN: Final = tuple(
    name for name in _OWN
    if name not in {"cpu_count", "cpus_per_task", "mem_per_node_mib", "mem_per_cpu_mib", "required_nodes"}
)  # fmt: skip
"""What stays as it is where a policy gives CPUs and memory."""

_KEPT_BY_MEMBERS: Final = (
    "node_count", "cpu_count", "cpus_per_task", "mem_per_node_mib", "mem_per_cpu_mib", "excluded_nodes", "features",
)  # fmt: skip
"""What of a request a member keeps, too."""

_MOST_MEMBERS: Final = 4


class BrokenInvariantError(BaseException):
    """An invariant does not hold; the text says which, of which job, and when. No handler of the product takes it."""


@dataclass(slots=True)
class _Known:
    """Facts of a user's job."""

    done: int = 0  # How often its training came to its end
    may_repeat: bool = False  # put back since by another than Muri
    cancelled: bool = False  # Whether its user, or a fault, ended it
    crashed: bool = False  # Whether a fault ended its processes
    waiting_since_s: float | None = None  # Since when Muri alone keeps it waiting; None while it does not


@dataclass(slots=True)
class Watch:
    """Watches a twin."""

    twin: Twin  # The twin
    max_wait_s: float  # Longer than this, and some cycles, no job may wait for Muri alone
    known: dict[int, _Known] = field(default_factory=dict)  # What is known of each user's job
    tampered: dict[int, bool] = field(default_factory=dict)  # Whether a job with damaged AdminComment had the license
    journal_lost: bool = False  # If so, a damaged member's request is lost, too
    succeeded_s: float = 0.0  # When a controller's cycle last succeeded
    _trained: Callable[[str, TrainingScript], None] = lambda what, script: None

    def begin(self) -> None:
        """Begin to watch."""
        self.twin.slurm.notes.append(self._note)
        self._trained = self.twin.nodes.on_training
        self.twin.nodes.on_training = self._note_training

    def of(self, job_id: int) -> _Known:
        """Return the known facts of a job."""
        return self.known.setdefault(job_id, _Known())

    def _say(self, text: str) -> None:
        at_s = self.twin.time.now_s - self.twin.begun_s
        raise BrokenInvariantError(f"{at_s:.1f} s: {text}")

    def _note(self, what: str, job: Job) -> None:
        if what in {"ended", "requeued"}:
            self._check_grants(job)
        course = self.twin.course_of(job.job_id)
        if course is None:
            return
        if what == "split" and (array := self.twin.slurm.ledger[job.job_id].array) in self.tampered:
            self.tampered[job.job_id] = self.tampered[array]
        elif what == "started":
            self._check_start(job)
        elif what == "ended":
            self._check_end(job, course)
        elif what == "requeued":
            self._check_requeue(job)
        elif what == "hold overridden" and not self._looks_like_muris(job):
            self._say(f"job {job.job_id} was released though others hold it")
        elif what == "cancelled by Muri":
            self._say(f"Muri cancelled job {job.job_id}")

    def _check_grants(self, pilot: Job) -> None:
        """Look whether a process still has GPUs that Slurm gives away now."""
        for run, scripts in self.twin.nodes.grants.items():
            if run.job_id == pilot.job_id and scripts:
                self._say(f"job {min(scripts)} still has the GPUs of placeholder {pilot.job_id}, which has ended")

    def _looks_like_muris(self, job: Job) -> bool:
        """Whether a hold lacks its tags: then it looks like that of a Muri which knew no other gate."""
        return job.job_id in self.tampered and not (self.tampered[job.job_id] and is_behind_license(job))

    def _asked(self, job: Job) -> Job:
        return self.twin.slurm.ledger[job.job_id].asked

    def difference(self, job: Job) -> str:
        """Describe how a job's request differs from its user's, "" if it does not.

        A policy may give a job other CPUs and memory; its AdminComment then has the original request.
        """
        asked, given = self._asked(job), tags.parse_given(job.admin_comment)
        if given is not None:
            for each in fields(given.original):
                if each.name == "oversubscribe":
                    continue  # Slurm cannot take it back
                kept, theirs = getattr(given.original, each.name), getattr(asked, each.name)
                if kept != theirs:
                    return f"what is kept of its {each.name} is {kept!r}, its user asked for {theirs!r}"
        for name in _OWN if given is None else _NEVER_GIVEN:
            mine, theirs = getattr(job, name), getattr(asked, name)
            if mine != theirs:
                return f"{name} is {mine!r}, its user asked for {theirs!r}"
        own, wanted = without_gate(job.licenses), without_gate(asked.licenses)
        return "" if own == wanted else f"licenses are {own!r}, its user asked for {wanted!r}"

    def _check_start(self, job: Job) -> None:
        self.of(job.job_id).waiting_since_s = None
        at_work = self._tasks_at_work(job)
        if 0 < job.array_limit < at_work:
            self._say(f"{at_work} tasks of array {job.array_job_id} run, {job.array_limit} may")
        state = tags.token(job.admin_comment, tags.STATE_PREFIX)
        if state is None:
            if (why := self.difference(job)) and job.job_id not in self.tampered:
                self._say(f"job {job.job_id} starts alone, but {why}")
            return
        self._check_kept(job)
        membership = tags.parse_state(job.admin_comment)
        pilot = self.twin.slurm.jobs.get(membership.pilot) if membership is not None else None
        if pilot is None:
            return
        for name in ("uid", "account", "qos", "partition", "reservation"):
            if getattr(pilot, name) != getattr(self._asked(job), name):
                self._say(f"the placeholder of job {job.job_id} has {name} {getattr(pilot, name)!r}")

    def _check_kept(self, member: Job) -> None:
        """Look whether a member starts with what is left of its own request."""
        asked = self._asked(member)
        if tags.parse_given(member.admin_comment) is not None or member.job_id in self.tampered:
            return
        for name in _KEPT_BY_MEMBERS:
            if (mine := getattr(member, name)) != (theirs := getattr(asked, name)):
                self._say(f"member {member.job_id} starts with {name} {mine!r}, its user asked for {theirs!r}")

    def _note_training(self, what: str, script: TrainingScript) -> None:
        self._trained(what, script)
        known = self.of(script.job_id)
        if what == "done":
            known.done += 1
            return
        if known.done and not known.may_repeat:
            self._say(f"job {script.job_id} trains again though its training came to its end")
        job, asked = self.twin.slurm.jobs[script.job_id], self.twin.slurm.ledger[script.job_id].asked
        if script.runtime is None and script.grant is not None:
            return  # it shares without turns
        if script.runtime is None:
            held = sum(held.need.gpus for _, held in self.twin.slurm.ledger[script.job_id].placed)
            if held != asked.gpu_count and script.job_id not in self.tampered:
                self._say(f"job {script.job_id} trains alone with {held} GPUs, its user asked for {asked.gpu_count}")
            return
        pilot = self.twin.slurm.jobs.get(script.runtime.pilot.job_id)
        if pilot is None or pilot.state is not JobState.RUNNING:
            self._say(f"job {script.job_id} trains in a group whose placeholder does not run")
            return
        if (pilot.uid, pilot.gpu_count) != (job.uid, asked.gpu_count):
            self._say(f"job {script.job_id} trains on {pilot.gpu_count} GPUs of uid {pilot.uid}")
        if len(script.runtime.at_work) >= _MOST_MEMBERS:
            self._say(f"job {script.job_id} is the fifth member of its group")

    def _check_requeue(self, job: Job) -> None:
        by, known = self.twin.slurm.ledger[job.job_id].by, self.of(job.job_id)
        if by not in {"muri", "member"}:
            known.may_repeat = True
        elif known.done and not known.may_repeat:
            self._say(f"job {job.job_id} goes back to the queue though its training came to its end")

    def _check_end(self, job: Job, course: Course) -> None:
        known = self.of(job.job_id)
        if known.cancelled or known.crashed:
            return
        wanted = JobState.COMPLETED if course.asked.work.exit_code == 0 else JobState.FAILED
        if job.state is wanted and (job.exit_code, known.done > 0) == (course.asked.work.exit_code, True):
            return
        if job.state is JobState.NODE_FAIL and not job.can_requeue:
            return
        if job.state is JobState.TIMEOUT and job.job_id in self.tampered:
            return
        self._say(f"job {job.job_id} ended as {job.state} with code {job.exit_code} after {known.done} trainings")

    def after_turn(self) -> None:
        """Check that the lease ends when all cycles fail: Slurm must go on as if Muri were not there."""
        twin = self.twin
        since_s = twin.time.now_s - max(self.succeeded_s, twin.begun_s)
        if twin.slurm.lease_runs and since_s > twin.config.lease_s + 2 * twin.config.interval_s:
            self._say(f"the lease runs though no cycle has succeeded for {since_s:.0f} s")

    def after_cycle(self) -> None:
        """Look whether a job waits for Muri for too long."""
        now_s = self.twin.time.now_s
        for course in self.twin.courses:
            job = self.twin.slurm.jobs.get(course.job_id)
            if job is None or course.state:
                continue
            known = self.of(job.job_id)
            if not self._waits_for_muri(job):
                known.waiting_since_s = None
                continue
            known.waiting_since_s = now_s if known.waiting_since_s is None else known.waiting_since_s
            if now_s - known.waiting_since_s > self.max_wait_s + 5 * self.twin.config.interval_s:
                self._say(f"job {job.job_id} waits for Muri for {now_s - known.waiting_since_s:.0f} s ({job.reason})")

    def _waits_for_muri(self, job: Job) -> bool:
        if job.state is not JobState.PENDING or job.begin_s > self.twin.time.now_s:
            return False
        if job.several_tasks:
            return False  # they come after the tasks that have records of their own
        holder, running = self.twin.slurm.ledger[job.job_id].holder, self.twin.slurm.running()
        if why_over_limits(job, running, self.twin.slurm.site.limits) or 0 < job.array_limit <= self._tasks_let_go(job):
            return False  # Slurm itself would not start it, or not before its siblings
        return holder not in {"user", "admin"} and (holder == "muri" or is_behind_license(job))

    def _tasks_at_work(self, job: Job) -> int:
        """How many tasks of a job's array run."""
        return sum(each.array_job_id == job.array_job_id for each in self.twin.slurm.running())

    def _tasks_let_go(self, job: Job) -> int:
        """How many tasks of a job's array run or wait for nothing but Slurm."""
        tasks = (each for each in self.twin.slurm.jobs.values() if each.array_job_id == job.array_job_id)
        return self._tasks_at_work(job) + sum(is_let_go(read_job(each)) for each in tasks)

    def begin_anew(self) -> None:
        """Let bounds count from now: the controller was kept from its work."""
        for known in self.known.values():
            if known.waiting_since_s is not None:
                known.waiting_since_s = self.twin.time.now_s

    def at_end(self, begun: Sequence[str]) -> None:
        """Look at what is left once every job has ended."""
        if begun:
            self._say(f"never ended: {'; '.join(begun)}")
        for job in self.twin.slurm.jobs.values():
            if job.state.is_active and read_job(job).role in {Role.PILOT, Role.DRY_RUN}:
                self._say(f"Muri's job {job.job_id} ({job.name}) is left over: {job.state} {job.reason}")
        for name, free in self.twin.slurm.free.items():
            node = self.twin.slurm.nodes[name]
            if (free.gpus, free.cpus, free.mem_mib) != (node.gpu_count, node.cpu_count, node.mem_mib):
                self._say(f"node {name} has {free.gpus} free GPUs and {free.cpus} free CPUs at the end")

    def left(self) -> None:
        """Say which jobs did not end."""
        for course in self.twin.courses:
            if not course.state:
                job = self.twin.slurm.jobs.get(course.job_id)
                shown: Any = job and (job.state.value, job.reason, job.held, job.licenses, job.admin_comment)
                self._say(f"job {course.job_id} has not ended: {shown}")
