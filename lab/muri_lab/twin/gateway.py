"""The way to the virtual Slurm, as the controller takes it; each call takes its time, and may be made to fail."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from muri.clock import whole_minutes
from muri.slurm_plugin.gateway.accounting import Accounting, NoAccountingError
from muri.slurm_plugin.gateway.base import Calls, NoGateLicenseError, check_new_job
from muri.slurm_plugin.records.cluster import Job, JobChange, JobState, NewJob, Snapshot
from muri.slurm_plugin.records.limits import PER_NODE, TYPED, GpuRemoval, Place, TriedForm
from muri.slurm_plugin.records.usage import Run
from muri_lab.twin.programs import NodeSide
from muri_lab.twin.slurm import gpus_in

GPUS_REMOVABLE: Final = GpuRemoval(
    "twin", 0.0, (TriedForm(PER_NODE, "gres/gpu:0,gres/muri:1"), TriedForm(TYPED, "gres/gpu:0,gres/muri:1")), ""
)

VERSION: Final = "26.05.5"

_Result = TypeVar("_Result")

Around = Callable[[str, Callable[[], Any]], Any]  # Makes a call: it may fail before or after, or be made elsewhere


def just_call(name: str, act: Callable[[], _Result]) -> _Result:
    """Make a call without any fault."""
    return act()


class VirtualGateway:
    """Implements `Gateway` on a virtual Slurm."""

    name = "virtual"

    def __init__(self, nodes: NodeSide, *, instant: bool = False) -> None:
        self._instant = instant
        self.around: Around = just_call  # Makes each call; faults are injected here
        self.clock_offset_s = 0.0  # How far the clock of the controller's host is ahead of slurmctld's
        self.slurm_calls: Calls = Counter()  # Nothing: there is no slurmctld to be called
        self._nodes = nodes
        self._slurm = nodes.slurm

    def _call(self, name: str, seconds: float, act: Callable[[], _Result]) -> _Result:
        def timed() -> _Result:
            if self._instant:
                self._slurm.answering()
                return act()
            self._slurm.time.sleep(seconds / 2)
            self._slurm.answering()
            result = act()
            self._slurm.time.sleep(seconds / 2)
            return result

        found: _Result = self.around(name, timed)
        return found

    def at_once(self) -> "VirtualGateway":
        """The same way, whose calls take no time."""
        return VirtualGateway(self._nodes, instant=True)

    def _change(self, name: str, act: Callable[[], None]) -> None:
        self._call(name, self._slurm.site.delays.change_s, act)

    def snapshot(self) -> Snapshot:
        """Read everything; the decision that follows takes its time here, too."""
        taken = self._call("snapshot", self._slurm.site.delays.read_s, self._snapshot)
        self._slurm.time.sleep(self._slurm.site.delays.decide_s)
        return taken

    def _snapshot(self) -> Snapshot:
        self._slurm.forget()
        self._nodes.report()
        slurm, taken_s = self._slurm, self._slurm.now_s + self.clock_offset_s
        nodes, reservations = slurm.shown_nodes(), slurm.shown_reservations()
        jobs, limits = tuple(slurm.jobs.values()), slurm.site.limits
        return Snapshot(taken_s, "twin", VERSION, jobs, nodes, reservations, limits=limits)

    def queue(self) -> Snapshot:
        """Read the jobs alone."""
        taken = self._call("queue", self._slurm.site.delays.read_s, self._snapshot)
        return replace(taken, nodes=(), reservations=())

    def one_job(self, job_id: int) -> Snapshot:
        """Read one job, of an array's id all its records."""
        queue = self.queue()
        return replace(queue, jobs=tuple(job for job in queue.jobs if job_id in {job.job_id, job.array_job_id}))

    def gpu_removal(self, known: GpuRemoval, place: Place, waiting: Job | None, now_s: float) -> GpuRemoval:
        """GPUs can be taken away, as on the sandbox."""
        return GPUS_REMOVABLE

    def submit(self, job: NewJob) -> int:
        """Submit a job as `submit_as` does: held, with its tag in its comment, then tagged, then released."""
        check_new_job(job)
        seconds = self._slurm.site.delays.new_job_s / 3
        job_id = self._call("submit", seconds, lambda: self._submit(job))
        tag = JobChange(admin_comment=job.admin_comment)
        self._call("submit: tag", seconds, lambda: self._tag(job_id, tag))
        self._call("submit: release", seconds, lambda: self._slurm.release(job_id))
        return job_id

    def _tag(self, job_id: int, tag: JobChange) -> None:
        self._slurm.modify(job_id, tag)
        self._slurm.set_comment(job_id, "")

    def _submit(self, job: NewJob) -> int:
        user = self._slurm.users.get(job.uid, f"user{job.uid}")
        return self._slurm.submit(record_of(job, user), self._nodes.program_of(job), job.environment, holder="muri")

    def modify(self, job_id: int, change: JobChange) -> None:
        """Change a job."""
        self._change("modify", lambda: self._slurm.modify(job_id, change))

    def split_tasks(self, job: Job, tasks: Sequence[int]) -> None:
        """Give tasks of an array records of their own."""
        self._change("split_tasks", lambda: self._slurm.split_tasks(job.job_id, tasks))

    def extend_lease(self, end_s: float) -> None:
        """Withhold the license until a time."""
        if not self._slurm.site.conf.gate_license:
            raise NoGateLicenseError("Slurm has no license muri_gate")
        end_s -= self.clock_offset_s  # slurmctld is told how long from now
        self._change("extend_lease", lambda: setattr(self._slurm, "lease_end_s", end_s))
        self._slurm.time.at(end_s, self._slurm.look_soon)

    def end_lease(self) -> None:
        """Withhold the license no longer."""

        def end() -> None:
            self._slurm.lease_end_s = 0.0
            self._slurm.look_soon()

        self._change("end_lease", end)

    def hold(self, job_id: int) -> None:
        """Hold a pending job."""
        self._change("hold", lambda: self._slurm.hold(job_id))

    def release(self, job_id: int) -> None:
        """Release a held job."""
        self._change("release", lambda: self._slurm.release(job_id))

    def requeue(self, job_id: int) -> None:
        """End a running job's run and put it back into the queue."""
        self._change("requeue", lambda: self._requeue(job_id, held=False))

    def requeue_hold(self, job_id: int) -> None:
        """The same, and hold it."""
        self._change("requeue_hold", lambda: self._requeue(job_id, held=True))

    def _requeue(self, job_id: int, *, held: bool) -> None:
        if self._slurm.known(job_id, "requeue").state.is_active:  # Slurm leaves an ended one as it is
            self._slurm.requeue(job_id, held=held)

    def cancel(self, job_id: int) -> None:
        """Cancel a job."""
        self._change("cancel", lambda: self._slurm.cancel(job_id))

    def gpus_in_use(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The twin's GPUs have no numbers."""
        return ()

    def job_environment(self, job_id: int) -> dict[str, str] | None:
        """Return the environment that a pending job was submitted with."""
        book = self._slurm.ledger.get(job_id)
        return None if book is None else dict(book.environment)


def record_of(job: NewJob, user: str) -> Job:
    """A submitted job of the controller's, its tag still in its own comment."""
    tasks = job.tasks_per_node * job.node_count
    return Job(
        job_id=0, user=user, uid=job.uid, gid=job.gid, account=job.account,
        partition=job.partition, qos=job.qos, name=job.name, state=JobState.PENDING, reason="", held=False,
        submit_s=0.0, begin_s=0.0, start_s=0.0, end_s=0.0, time_limit_s=60 * whole_minutes(job.time_limit_s),
        gpu_count=gpus_in(job.gpu_request) * job.node_count, gpu_request=job.gpu_request, node_count=job.node_count,
        cpu_count=job.cpu_count * tasks, cpus_per_task=job.cpu_count, mem_per_node_mib=job.mem_per_node_mib,
        nodes="", required_nodes=job.required_nodes, dependency="", can_requeue=job.requeue, restart_count=0,
        exit_code=0, batch=True, array=False, het=False, command="", work_dir=job.work_dir, submit_line="",
        admin_comment="", comment=job.admin_comment, licenses=job.licenses, reservation=job.reservation,
        features=job.features, excluded_nodes=job.excluded_nodes, oversubscribe=job.oversubscribe,
    )  # fmt: skip


class NoAccounts(Accounting):
    """A cluster without accounting."""

    def __init__(self) -> None:
        """Start no command."""

    def runs_of(self, jobs: Iterable[int | str]) -> list[Run]:
        """There are no accounts."""
        raise NoAccountingError("the twin keeps no accounts")

    def set_admin_comment(self, job_id: int, comment: str, name: str = "") -> None:
        """There are no accounts."""
        raise NoAccountingError("the twin keeps no accounts")
