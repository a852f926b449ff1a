"""A small Slurm in memory for tests of the controller's logic; the sandbox tests use the real one."""

import itertools
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from muri.group_spec import GroupSpec, read_group
from muri.profiler.records import STAGES, ProfileKey, StageProfile
from muri.slurm_plugin.gateway.base import GatewayError, NoGateLicenseError, NoSuchJobError
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobChange, JobState, NewJob, Node, Reservation, Snapshot
from muri.slurm_plugin.records.comment_reports import speeds_token
from muri.slurm_plugin.records.limits import NO_SITE_LIMITS, PER_NODE, TYPED, GpuRemoval, Place, TriedForm
from muri.slurm_plugin.records.roles import GATE_LICENSE, Role, is_behind_license, read_job, with_gate

NOW_S = 1_000_000.0
CRED_EXPIRE_S = 120.0
"""How long slurmctld lets a requeued job wait, unless told otherwise."""


def make_job(job_id: int, **changes: Any) -> Job:
    """A held one-GPU job of alice's, as submitted with --muri; its CPUs are one task's."""
    changes.setdefault("cpus_per_task", changes.get("cpu_count", 4))
    job = Job(
        job_id=job_id, user="alice", uid=1001, gid=1001, account="", partition="main", qos="", name=f"job{job_id}",
        state=JobState.PENDING, reason="JobHeldUser", held=True, submit_s=NOW_S - 100 + job_id / 100, begin_s=0.0,
        start_s=0.0, end_s=0.0, time_limit_s=3600, gpu_count=1, gpu_request="gres/gpu:1", node_count=1, cpu_count=4,
        cpus_per_task=4, mem_per_node_mib=0, nodes="", required_nodes="", dependency="", can_requeue=True,
        restart_count=0, exit_code=0, batch=True, array=False, het=False, command="/home/alice/train.sh",
        work_dir="/home/alice", submit_line="sbatch train.sh 5", comment="",
        admin_comment="muri:model=m1,batch-size=8,duration=100",
    )  # fmt: skip
    return replace(job, **changes)


def behind_license(job: Job) -> Job:
    """The same job, behind the license instead of a hold."""
    comment = tags.with_token(job.admin_comment, tags.GATE_PREFIX, tags.LICENSE_GATE)
    licenses = with_gate(job.licenses)
    return replace(job, held=False, reason="Licenses", priority=7517, licenses=licenses, admin_comment=comment)


def make_node(name: str, **changes: Any) -> Node:
    """A node with two free GPUs."""
    node = Node(
        name=name, usable=True, state="IDLE", partitions=("main",), cpu_count=32, cpus_allocated=0, gpu_count=2,
        gpus_allocated=0, gpu_type="gpu",
    )  # fmt: skip
    return replace(node, **changes)


class Killed(BaseException):
    """The process dies here: nothing after this line runs."""


GPUS_REMOVABLE = GpuRemoval("fake", NOW_S, (TriedForm(PER_NODE, "gres/gpu:0"), TriedForm(TYPED, "gres/gpu:0")), "")


def _call(name: str) -> Any:
    """A call that tests see before and after, of what the method with this name behind an underscore does."""

    def call(self: "FakeSlurm", *arguments: Any) -> Any:
        self.before_call(name)
        self.calls.append(name)
        result = getattr(self, f"_{name}")(*arguments)
        self.after_call(name)
        return result

    return call


class FakeCpus:
    """The CPUs of one node by number, given out as select/cons_tres does; jobs that share lie in layers."""

    def __init__(self, cpu_count: int, core_cpus: int = 1) -> None:
        self._all = frozenset(range(cpu_count))
        self._core_cpus = core_cpus
        self._held: dict[int, tuple[frozenset[int], bool]] = {}

    def used(self) -> frozenset[int]:
        """CPUs that at least one job holds."""
        return frozenset().union(*(cpus for cpus, _ in self._held.values()))

    def end(self, job_id: int) -> None:
        """Take a job's CPUs back."""
        self._held.pop(job_id, None)

    def start(self, job_id: int, cpus: int, layers: int = 1) -> bool:
        """Give a job its CPUs, in one of so many layers where it shares; False where there are too few."""
        cpus += -cpus % self._core_cpus
        chosen = self._chosen(cpus, layers)
        if chosen is not None:
            self._held[job_id] = chosen, layers > 1
        return chosen is not None

    def _chosen(self, cpus: int, layers: int) -> frozenset[int] | None:
        if layers > 1 and not all(shares for _, shares in self._held.values()):
            return None
        free = [self._all - self.used()]  # idle CPUs go first
        free += [self._all - layer for layer in self._layers(layers)] if layers > 1 else []
        return next((frozenset(sorted(each)[:cpus]) for each in free if len(each) >= cpus), None)

    def _layers(self, count: int) -> list[frozenset[int]]:
        """The layers as Slurm builds them anew after each end: jobs by their first CPU, then by size; fullest first."""
        found: list[frozenset[int]] = [frozenset()] * count
        for cpus in sorted((cpus for cpus, _ in self._held.values()), key=lambda each: (min(each), len(each))):
            index = next((index for index, layer in enumerate(found) if not layer & cpus), -1)
            found[index] |= cpus
            found.sort(key=len, reverse=True)
        return found


class FakeSlurm:
    """Implements Gateway; `tick` is the scheduler.

    Args:
        jobs: The queue.
        nodes: The cluster.
        gate_license: Whether slurm.conf has the license `muri_gate`.
    """

    name = "fake"
    split_tasks, submit, modify, cancel = map(_call, ("split_tasks", "submit", "modify", "cancel"))
    hold, release, requeue, requeue_hold = map(_call, ("hold", "release", "requeue", "requeue_hold"))

    def __init__(self, jobs: list[Job], nodes: list[Node], *, gate_license: bool = False) -> None:
        self.gate_license = gate_license
        self.lease_end_s = 0.0
        self.reservations: tuple[Reservation, ...] = ()
        self.limits = NO_SITE_LIMITS
        self.jobs = {job.job_id: job for job in jobs}
        self.nodes = {node.name: node for node in nodes}
        self.now_s = NOW_S
        self.calls: list[str] = []
        self.slurm_calls: Counter[str] = Counter()
        self.starts: dict[int, int] = {}
        self.submitted: dict[int, NewJob] = {}
        self.before_call: Callable[[str], None] = lambda name: None
        self.after_call: Callable[[str], None] = lambda name: None
        self._next_id = max([job.job_id for job in jobs], default=0) + 100
        self._cpus: dict[str, FakeCpus] = {}

    @contextmanager
    def killing(self, side: str, nth: int) -> Iterator[None]:
        """Within, the caller dies before or after its nth call; the first is 1."""
        numbers = itertools.count(1)

        def die(_name: str) -> None:
            if next(numbers) == nth:
                raise Killed

        setattr(self, f"{side}_call", die)
        try:
            yield
        finally:
            setattr(self, f"{side}_call", lambda name: None)

    def _pending(self, job_id: int) -> Job:
        job = self.jobs.get(job_id)
        if job is None:
            raise NoSuchJobError(f"job {job_id}: Invalid job id specified")
        if job.state is not JobState.PENDING:
            raise GatewayError(f"job {job_id}: Job is not pending execution")
        return job

    def _update(self, job_id: int, **changes: Any) -> None:
        self.jobs[job_id] = replace(self.jobs[job_id], **changes)

    def snapshot(self) -> Snapshot:
        free = self.free()
        nodes = tuple(
            replace(
                node,
                gpus_allocated=node.gpu_count - free[name],
                cpus_allocated=node.cpus_allocated + len(self._cpus_of(name).used()),
            )
            for name, node in sorted(self.nodes.items())
        )
        jobs = tuple(self.jobs[job_id] for job_id in sorted(self.jobs))
        lease = Reservation(GATE_LICENSE, "", 0.0, self.lease_end_s, ("LICENSE_ONLY",), f"{GATE_LICENSE}:1000000")
        reservations = (*self.reservations, *((lease,) if self.lease_end_s > self.now_s else ()))
        return Snapshot(
            self.now_s, "fake", "26.05", jobs, nodes, reservations, limits=self.limits, gpu_removal=GPUS_REMOVABLE
        )

    def gpu_removal(self, known: GpuRemoval, place: Place, waiting: Job | None, now_s: float) -> GpuRemoval:
        return GPUS_REMOVABLE

    def queue(self) -> Snapshot:
        return replace(self.snapshot(), nodes=(), reservations=())

    def one_job(self, job_id: int) -> Snapshot:
        queue = self.queue()
        return replace(queue, jobs=tuple(job for job in queue.jobs if job_id in {job.job_id, job.array_job_id}))

    def tagged(self) -> Snapshot:
        return self.snapshot()

    def _split_tasks(self, job: Job, tasks: Sequence[int]) -> None:
        for task in tasks:
            job_id, self._next_id = self._next_id, self._next_id + 1
            left = [each for each in self._pending(job.job_id).array_tasks.split(",") if each != str(task)]
            self.jobs[job_id] = replace(self.jobs[job.job_id], job_id=job_id, array_tasks=str(task))
            self._update(job.job_id, array_tasks=",".join(left))

    def extend_lease(self, end_s: float) -> None:
        if not self.gate_license:
            raise NoGateLicenseError(f"there is no license {GATE_LICENSE}")
        self.lease_end_s = end_s

    def end_lease(self) -> None:
        self.lease_end_s = 0.0

    def _submit(self, job: NewJob) -> int:
        job_id, self._next_id = self._next_id, self._next_id + 1
        from muri_lab.twin.gateway import record_of  # here: tests of a host's few packages lack the lab

        user = next((each.user for each in self.jobs.values() if each.uid == job.uid), "alice")
        self.submitted[job_id] = job
        self.jobs[job_id] = replace(
            record_of(job, user), job_id=job_id, submit_s=self.now_s, admin_comment=job.admin_comment, comment=""
        )
        return job_id

    def _modify(self, job_id: int, change: JobChange) -> None:
        from muri_lab.twin.slurm import changed_fields, is_harmless

        job = self.jobs[job_id] if is_harmless(change) and self.jobs[job_id].state.is_active else self._pending(job_id)
        self.jobs[job_id] = replace(job, **changed_fields(job, change, self.now_s))

    def _hold(self, job_id: int) -> None:
        self.jobs[job_id] = replace(self._pending(job_id), held=True, reason="JobHeldUser")

    def _release(self, job_id: int) -> None:
        self.jobs[job_id] = replace(self._pending(job_id), held=False, reason="")

    def _requeue_hold(self, job_id: int) -> None:
        self._requeue(job_id)
        self._update(job_id, held=True, reason="job_requeued_in_held_state")

    def _requeue(self, job_id: int) -> None:
        job = self.jobs[job_id]
        if not job.state.is_active:
            raise NoSuchJobError(f"job {job_id}: Job/step already completing or completed")
        times = {}
        if job.state is JobState.RUNNING:  # as Slurm does
            begin_s = self.now_s + CRED_EXPIRE_S
            times = {"restart_count": job.restart_count + 1, "begin_s": begin_s, "submit_s": self.now_s}
        self._free_cpus(job_id)
        self._update(job_id, state=JobState.PENDING, nodes="", start_s=0.0, **times)

    def _cpus_of(self, name: str) -> FakeCpus:
        """The CPUs of a node, beside those that it says others hold."""
        node = self.nodes[name]
        return self._cpus.setdefault(name, FakeCpus(node.cpu_count - node.cpus_allocated, node.threads_per_core))

    def _free_cpus(self, job_id: int) -> None:
        for cpus in self._cpus.values():
            cpus.end(job_id)

    def _cancel(self, job_id: int) -> None:
        self.end(job_id, state=JobState.CANCELLED)

    def gpus_in_use(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return ()

    def job_environment(self, job_id: int) -> dict[str, str] | None:
        return {"PATH": "/bin", "HOME": "/home/alice", "SLURM_JOB_ID": str(job_id)}

    def end(self, *job_ids: int, state: JobState = JobState.COMPLETED) -> None:
        """End jobs."""
        for job_id in job_ids:
            if self.jobs[job_id].state.is_active:
                self._free_cpus(job_id)
                self._update(job_id, state=state, end_s=self.now_s)

    def let_work(self, cycle: Callable[[], object], jobs: Collection[int]) -> None:
        """Run cycles until jobs have ended, each some minutes after its start."""
        for _ in range(40):
            cycle()
            if not any(job.state.is_active for job in self.jobs.values()):
                return
            self.tick(100)
            for job_id in jobs:
                job = self.jobs[job_id]
                if job.state is JobState.RUNNING and job.start_s < self.now_s - 300:
                    self.end(job_id)

    def free(self) -> dict[str, int]:
        """Return the free GPUs of each node."""
        free = {name: node.gpu_count for name, node in self.nodes.items()}
        for job in self.jobs.values():
            if job.state is JobState.RUNNING and job.gpu_count:
                names = job.nodes.split(",")
                for name in names:
                    free[name] -= job.gpu_count // len(names)
        return free

    def tick(self, seconds: float = 10.0) -> None:
        """Let time pass and start what can start, in order of job ids."""
        self.now_s += seconds
        for job in self._in_order():
            if (
                job.state is JobState.PENDING
                and not job.held
                and not (is_behind_license(job) and self.lease_end_s > self.now_s)
                and job.begin_s <= self.now_s
                and self._dependency_met(job)
            ):
                free = self.free()
                names = [job.required_nodes] if job.required_nodes else sorted(self.nodes)
                layers = self.limits.partition(job.partition).oversubscribe if job.oversubscribe else 1
                fitting = (name for name in names if free[name] >= job.gpu_count)
                taken = (name for name in fitting if self._cpus_of(name).start(job.job_id, job.given_cpus, layers))
                if name := next(taken, ""):
                    self._start(job, name)

    def _in_order(self) -> list[Job]:
        """Return all jobs, pilots first."""
        return sorted(self.jobs.values(), key=lambda job: (tags.parse_pilot(job.admin_comment) is None, job.job_id))

    def _start(self, job: Job, nodes: str) -> None:
        self._update(job.job_id, state=JobState.RUNNING, nodes=nodes, start_s=self.now_s, reason="")
        self.starts[job.job_id] = self.starts.get(job.job_id, 0) + 1

    def _dependency_met(self, job: Job) -> bool:
        names = {each.name_in_slurm: each for each in self.jobs.values()} | {
            str(each): self.jobs[each] for each in self.jobs
        }
        parts = [part.removeprefix("after:") for part in job.dependency.split(",") if part]
        return all(part in names and names[part].state is not JobState.PENDING for part in parts)


def four_jobs(**changes: Any) -> list[Job]:
    """Jobs 1 to 4, each of another kind."""
    return [make_job(i, admin_comment=f"muri:model=m{i},batch-size=8,duration=100", **changes) for i in (1, 2, 3, 4)]


def one_gpu() -> list[Node]:
    """One node with one GPU."""
    return [make_node("n1", gpu_count=1)]


def behind_lease(jobs: Iterable[Job], nodes: list[Node], kind: type[FakeSlurm] = FakeSlurm) -> Any:
    """A Slurm whose license keeps the jobs waiting, as a cycle has left them."""
    slurm = kind([behind_license(job) for job in jobs], nodes, gate_license=True)
    slurm.extend_lease(NOW_S + 600)
    return slurm


def pilots(slurm: FakeSlurm) -> list[Job]:
    """The groups' pilot jobs."""
    return [job for job in slurm.jobs.values() if read_job(job).role is Role.PILOT]


def one_cycle(make_controller: Any, slurm: FakeSlurm, *known: Any, **changes: Any) -> dict[int, Any]:
    """A cycle of a new controller; returns what users are told, by job id."""
    with make_controller(slurm, *known, **changes) as controller:
        return {job.job_id: job for job in controller.cycle().jobs}


def run_cycles(make_controller: Any, slurm: FakeSlurm, count: int, seconds: float = 10.0, **changes: Any) -> Any:
    """Cycles of new controllers, each before a run of the scheduler; returns what users are told by the last one."""
    for _ in range(count):
        told = one_cycle(make_controller, slurm, **changes)
        slurm.tick(seconds)
    return told


def group_at_work(make_controller: Any, *known: Any, count: int = 4, **changes: Any) -> FakeSlurm:
    """Four jobs, or the first of them, that share a GPU."""
    slurm = FakeSlurm(four_jobs()[:count], one_gpu())
    one_cycle(make_controller, slurm, *known, **changes)
    for _ in range(3):
        slurm.tick()
    return slurm


def speeds_report(
    speeds: Mapping[int, float], iterations: int = 90, discipline: str = "fair", steady: Collection[str] = (),
    broken: Collection[int] = (),
) -> str:  # fmt: skip
    """Return a pilot job's comment about members whose iteration takes 1 s alone."""
    figures = {"iterations": iterations, "stage_s": dict.fromkeys(STAGES, 0.0), "wait_s": dict.fromkeys(STAGES, 0.0)}
    members = {
        str(job_id): {**figures, "iteration_s": 1 / speed, "promise_broken": job_id in broken}
        for job_id, speed in speeds.items()
    }
    return speeds_token({"members": members, "discipline": discipline}, steady) or ""


def dry_runs(slurm: FakeSlurm, *users: str) -> list[Job]:
    """The dry runs that wait or run, of some users or of all."""
    found = [job for job in slurm.jobs.values() if read_job(job).role is Role.DRY_RUN and job.state.is_active]
    return [job for job in found if not users or job.user in users]


MEASURED = {"load_s": 0.9, "preprocess_s": 0.1, "propagate_s": 0.1, "synchronize_s": 0.1, "iteration_s": 1.2}
"""A dry run's result."""


def end_dry_run(slurm: FakeSlurm, run: Job, target: int, **result: Any) -> None:
    """End a dry run of a minute, which leaves its result in the comment of a job."""
    slurm.jobs[run.job_id] = replace(run, state=JobState.RUNNING, start_s=slurm.now_s - 60)
    token = tags.token(run.admin_comment, tags.DRY_RUN_PREFIX)
    text = tags.PROFILE_PREFIX + tags.format_json({"iterations": 20, "token": token, **result})
    slurm.jobs[target] = replace(slurm.jobs[target], comment=text)
    slurm.end(run.job_id)


def profile(model: str, stages: tuple[float, float, float, float]) -> StageProfile:
    """A profile of a one-GPU model."""
    return StageProfile(ProfileKey(model, 8, 1, "gpu"), *stages, iteration_s=sum(stages), iterations=20)


FOUR_KINDS = (
    profile("m1", (0.7, 0.1, 0.1, 0.1)),
    profile("m2", (0.1, 0.7, 0.1, 0.1)),
    profile("m3", (0.1, 0.1, 0.7, 0.1)),
    profile("m4", (0.1, 0.1, 0.1, 0.7)),
)


def told(pilot: NewJob) -> GroupSpec:
    """Return a pilot job's description of its group."""
    words = shlex.split(pilot.script.splitlines()[1])
    return read_group(words[words.index("--group") + 1])
