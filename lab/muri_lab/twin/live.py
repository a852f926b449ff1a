"""`muri simulate --model live`: a trace run by the real controller on a virtual Slurm."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from muri.clock import MIB_PER_GIB
from muri.policies.registry import get_policy
from muri.profiler.records import RESOURCES
from muri.simulator.engine.checks import check_cluster
from muri.simulator.engine.world import LEAST_REMAINING_S, Samples
from muri.simulator.model import (
    Cluster,
    GroupSpan,
    JobRecord,
    Sample,
    Settings,
    Simulation,
    SimulationError,
    SimulationModel,
    SimulationResult,
    TraceJob,
)
from muri.slurm_plugin.config import Config, Grouping
from muri.slurm_plugin.controller.assemble import policy_of
from muri.slurm_plugin.records.cluster import Job, JobState
from muri_lab.twin.programs import Placeholder, TrainingScript, Work
from muri_lab.twin.sharing import Iteration
from muri_lab.twin.site import Delays, Site, plain_nodes, shared_cpus
from muri_lab.twin.slurm import unfolded
from muri_lab.twin.submission import FIRST_UID, Submission
from muri_lab.twin.twin import Course, Twin, folder

DEFAULT_INTERVAL_S: Final = 360.0
_CPUS_OF_NODE: Final = 256
_MIB_OF_NODE: Final = 4_000_000


def _check_policy(policy: str, options: Mapping[str, Any]) -> None:
    get_policy(policy)  # its options are those of muri.yaml, which the simulation checks


def simulate_live(task: Simulation) -> SimulationResult:
    """Run a trace through the twin until its last job has ended."""
    _check(task.settings, task.cluster)
    config = _config_of(task)
    policy_of(config)  # what is wrong with it is said before anything begins
    with folder() as place:
        twin = Twin(_site_of(task.cluster, task.settings), config, place)
        users = {name: FIRST_UID + number for number, name in enumerate(sorted({job.user for job in task.trace.jobs}))}
        if not task.settings.profiling_s:
            twin.know({job.key: job.profile for job in task.trace.jobs}.values())
        twin.submit(_submission(job, users, task, twin.begun_s) for job in task.trace.jobs)
        twin.slurm.lease_end_s = twin.begun_s + config.lease_s  # the controller has been at work before
        _plan_outages(twin, task)
        film = _Film(task, twin)
        twin.run(on_events=bool(task.options.get("on_events", False)))
        records = film.records()
        return task.result(records, film.samples.thinned(), film.spans(), ())


def _check(settings: Settings, cluster: Cluster) -> None:
    check_cluster(cluster)
    refused = {
        "--profile-noise": settings.profile_noise, "--interference": settings.interference,
        "--slowdown utilization": settings.slowdown != "pairs",
    }  # fmt: skip
    for name, given in refused.items():
        if given:
            raise SimulationError(f"{name} is for --model default; --model live measures and shares as a cluster does")


def _config_of(task: Simulation) -> Config:
    options = dict(task.options)
    grouping = {name: options.pop(name) for name in Grouping.model_fields if name in options}
    preemption = {"enabled": bool(options.pop("preemption", False))}
    options.pop("on_events", None)
    values = {
        "policy": task.policy,
        "policy_options": options,
        "interval_s": task.settings.interval_s or DEFAULT_INTERVAL_S,
        "grouping": grouping,
        "preemption": preemption,
        "gpu_mem_gib": {"gpu": task.cluster.gpu_mem_gib} if task.cluster.gpu_mem_gib else {},
        "profiling": {"mode": "dry-run"},  # --profiling-s says how long one takes
    }
    try:
        return Config(**values)
    except ValueError as error:
        raise SimulationError(f"muri.yaml would refuse that: {error}") from error


def _site_of(cluster: Cluster, settings: Settings) -> Site:
    cpus = int(cluster.cpus_per_node) or _CPUS_OF_NODE
    mem_mib = int(cluster.mem_gib_per_node * MIB_PER_GIB) or _MIB_OF_NODE
    delays = Delays(dry_run_s=settings.profiling_s) if settings.profiling_s else Delays()
    return Site(plain_nodes(cluster.node_count, cluster.gpus_per_node, cpus, mem_mib), shared_cpus(), delays=delays)


def _submission(job: TraceJob, users: Mapping[str, int], task: Simulation, begun_s: float) -> Submission:
    nodes = max(1, -(-job.gpu_count // task.cluster.gpus_per_node))
    if job.gpu_count > task.cluster.gpu_count or job.gpu_count % nodes:
        raise SimulationError(
            f"job {job.job_id} asks for {job.gpu_count} GPUs, which {task.cluster.node_count} nodes with "
            f"{task.cluster.gpus_per_node} GPUs each cannot give in equal parts; simulate a larger cluster"
        )
    duration = f",duration={max(1, round(job.service_s))}" if task.settings.durations_known else ""
    opportunistic = ",opportunistic=1" if job.opportunistic else ""
    tasks = job.gpu_count if job.gpu_count > 1 else 1
    return Submission(
        submit_s=begun_s + job.submit_s,
        user=job.user,
        uid=users[job.user],
        work=Work(Iteration.of(job.profile), job.iterations, gpu_mem_gib=job.profile.gpu_mem_gib),
        mark=f"model={job.key.model},batch-size={max(1, job.key.batch_size)}{duration}{opportunistic}",
        name=str(job.job_id),
        node_count=nodes,
        gpus_per_node=job.gpu_count // nodes,
        cpus_per_task=max(1, int(job.cpu_count or job.gpu_count) // tasks),
    )


def _plan_outages(twin: Twin, task: Simulation) -> None:
    for outage in task.settings.outages:
        name = f"n{outage.node + 1}"

        def away(name: str = name, drain: bool = outage.drain) -> None:
            if drain:
                twin.slurm.set_node(name, usable=False, state="DRAIN")
            else:
                twin.slurm.fail_node(name)

        def back(name: str = name) -> None:
            twin.slurm.set_node(name, usable=True, state="IDLE")

        twin.time.at(twin.begun_s + outage.start_s, away)
        twin.time.at(twin.begun_s + outage.end_s, back)


@dataclass(slots=True)
class _Film:
    """What happens over time, for the result."""

    task: Simulation
    twin: Twin
    samples: Samples = field(default_factory=Samples)
    _spans: list[GroupSpan] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin to film."""
        self.twin.slurm.notes.append(self._note)
        self._sample()

    def _sample(self) -> None:
        """Look at the cluster, and again with the next cycle."""
        interval_s, slurm = self.twin.config.interval_s, self.twin.slurm
        waited, busy = [], [0.0] * len(RESOURCES)
        for job in slurm.jobs.values():
            course = self.twin.course_of(job.job_id)
            if course is None or course.state:
                continue
            if job.state is JobState.PENDING:
                service_s = course.asked.work.iterations * course.asked.work.iteration.iteration_s
                since_s = self.twin.time.now_s - course.submitted_s
                waited.append(since_s / max(LEAST_REMAINING_S, service_s))
            else:
                _add_busy(busy, course, self.twin)
        held = sum(node.gpu_count - slurm.free[name].gpus for name, node in slurm.nodes.items())
        share = [value / self.task.cluster.gpu_count for value in busy]
        index = sum(waited) / len(waited) if waited else 0.0
        at_s = self.twin.time.now_s - self.twin.begun_s
        sample = Sample(at_s, interval_s, len(waited), index, held, (share[0], share[1], share[2], share[3]))
        self.samples.add(sample)
        if self.task.progress is not None:
            self.task.progress(1 - self.twin.left / max(1, len(self.twin.courses)))
        self.twin.time.after(interval_s, self._sample)

    def _note(self, what: str, job: Job) -> None:
        if not self.task.with_spans or what not in {"requeued", "ended"} or not job.start_s:
            return
        course, program = self.twin.course_of(job.job_id), self.twin.slurm.ledger[job.job_id].program
        if course is not None and not course.pilots:
            self._spans.append(self._span(job, (int(course.asked.name),)))
        elif isinstance(program, Placeholder):
            members = [self.twin.course_of(int(member)) for member in program.served]
            names = tuple(int(member.asked.name) for member in members if member is not None)
            self._spans.append(self._span(job, names))

    def _span(self, job: Job, members: tuple[int, ...]) -> GroupSpan:
        first = min(int(name.removeprefix("n")) for name in unfolded(job.nodes)) if job.nodes else 1
        begun_s = self.twin.begun_s
        return GroupSpan(
            job.start_s - begun_s, self.twin.time.now_s - begun_s, members, first - 1, max(1, job.gpu_count)
        )

    def spans(self) -> tuple[GroupSpan, ...]:
        """Stays on GPUs, in order."""
        return tuple(sorted(self._spans, key=lambda span: (span.start_s, span.members)))

    def records(self) -> tuple[JobRecord, ...]:
        """The course of each job, by job id."""
        jobs = {str(job.job_id): job for job in self.task.trace.jobs}
        found = [_record(jobs[course.asked.name], course, self.twin) for course in self.twin.courses]
        return tuple(sorted(found, key=lambda record: record.job.job_id))


def _record(job: TraceJob, course: Course, twin: Twin) -> JobRecord:
    if course.state != JobState.COMPLETED:
        raise SimulationError(f"job {job.job_id} ended as {course.state}, which no setting here asks for")
    return JobRecord(
        job, course.starts_s[0] - twin.begun_s, course.end_s - twin.begun_s, course.run_s, len(course.starts_s) - 1,
        course.shared_s,
    )  # fmt: skip


def _add_busy(busy: list[float], course: Course, twin: Twin) -> None:
    """Add the share of its GPUs' time in which a running job uses each resource."""
    program = twin.slurm.ledger[course.job_id].program
    if not isinstance(program, TrainingScript) or not program.trains:
        return
    speed = 1.0 if program.runtime is None else program.runtime.members[course.job_id].speed
    iteration = program.work.iteration
    for resource, seconds in enumerate(iteration.stage_s):
        busy[resource] += speed * seconds / iteration.iteration_s * course.asked.gpu_count


MODEL: Final = SimulationModel(simulate_live, _check_policy)
