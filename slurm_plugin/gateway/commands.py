"""The gateway through Slurm's commands: for sites where no pyslurm version fits Slurm."""

import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Final

from muri.slurm_plugin.gateway import tables, text_fields
from muri.slurm_plugin.gateway.accounting import LimitsReader, slurm_settings
from muri.slurm_plugin.gateway.base import (
    Calls,
    GatewayError,
    GatewayUnavailableError,
    NoSuchJobError,
    job_ended,
    job_environment,
    job_pending,
    job_started,
    no_such_gres,
    passing_over,
)
from muri.slurm_plugin.gateway.gpu_removal import find_gpu_removal
from muri.slurm_plugin.gateway.queue_reader import ArrayRecords, DetailsReader, QueueReader, read_tagged_jobs
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.gateway.squeue import known_fields
from muri.slurm_plugin.gateway.submit_as import Submissions
from muri.slurm_plugin.gateway.tables import Held, ReservationsReader, held_in, nodes_of_table
from muri.slurm_plugin.records.cluster import Job, JobChange, NewJob, Node, Snapshot, Unreadable
from muri.slurm_plugin.records.limits import WAYS, GpuRemoval, Place

#: The oldest Slurm that Muri was tried with.
_OLDEST = (22, 5)

_SHOW_JOB = ["scontrol", "--all", "--oneliner", "show", "job"]

_LEAST_CPUS: Final = "MinCPUsNode"
_NO_FIGURES_PER_GPU: Final = ("TresPerNode=gres/gpu:0", "CpusPerTres=", "MemPerTres=")
"""Clears a job's CPUs and memory for each GPU; Slurm refuses a request without GPUs before, and less than all three."""


class CommandGateway:
    """Speaks to slurmctld through squeue, scontrol, sbatch and scancel.

    A snapshot is `squeue` and `scontrol show nodes`, each of which asks for the partitions as well (four RPCs in all);
    their number does not depend on the queue's length. Reservations and the site's limits are read some minutes apart.
    `scontrol show job` adds the details of new jobs with Muri's tag that squeue does not show.

    Raises:
        GatewayUnavailableError: The commands are missing or too old.
        SlurmUnreachableError: slurmctld does not answer.
    """

    name = "command"

    def __init__(self, commands: SlurmCommands | None = None) -> None:
        self._commands = commands or SlurmCommands()
        settings = slurm_settings(self._commands)
        self._limits = LimitsReader(self._commands)
        self._reservations = ReservationsReader(self._reservation_table)
        self._submissions = Submissions(self._commands, self._limits.forget)
        self._arrays = ArrayRecords()
        self._cluster = settings.get("ClusterName", "")
        self._state_save_location = settings.get("StateSaveLocation", "")
        self.slurm_version = settings.get("SLURM_VERSION", "")  # slurmctld's
        if release_of(self.slurm_version) < _OLDEST:
            raise GatewayUnavailableError(
                f"Slurm {self.slurm_version or 'of an unknown version'} is too old: Muri needs Slurm 22.05 or newer"
            )
        self._gres_separator = ":" if release_of(self.slurm_version) < (22, 11) else "/"

    @property
    def slurm_calls(self) -> Calls:
        """How often Slurm was asked, by kind."""
        return self._commands.calls

    @cached_property
    def _queue(self) -> QueueReader:
        """The reader of the queue, which `muri drain` does not need."""
        try:
            listed = self._commands.run("list squeue's fields", ["squeue", "--helpFormat"])
        except GatewayError as error:
            if "unrecognized option" not in str(error):  # Slurm 23.11 and older do not know it
                raise
            listed = ""
        return QueueReader(self._commands, known_fields(listed), DetailsReader(self.show_job))

    def show_job(self, job_id: int) -> bytearray:
        """Return the output of `scontrol show job` for one job, a small RPC, or for all with 0."""
        what, chosen = (f"job {job_id}", [str(job_id)]) if job_id else ("the jobs", [])
        return self._commands.output(f"read all that {what} asks for", [*_SHOW_JOB, *chosen])

    def snapshot(self) -> Snapshot:
        """Read all jobs, nodes and reservations."""
        limits = self._limits.read()  # first, for the queue's records depend on what jobs get by default
        queue, nodes = self.queue(), self._nodes()
        return replace(queue, nodes=nodes, limits=limits, reservations=self._reservations.read(nodes))

    def queue(self) -> Snapshot:
        """Read only the jobs."""
        return self._read(self._queue)

    def one_job(self, job_id: int) -> Snapshot:
        """Read one job, of an array's id all its records."""
        return self._read(replace(self._queue, job_id=job_id, details=DetailsReader(self.show_job)))

    def _read(self, reader: QueueReader) -> Snapshot:
        taken_s = time.time()
        return self._snapshot_of(*reader.read(taken_s, self._limits.partitions), taken_s)

    def _snapshot_of(self, jobs: Iterable[Job], unreadable: Iterable[Unreadable], taken_s: float) -> Snapshot:
        """Return the queue, and remember which record of an array each job's id means."""
        jobs = tuple(sorted(jobs, key=lambda job: job.job_id))
        self._arrays.learn(jobs)
        return Snapshot(taken_s, self._cluster, self.slurm_version, jobs, (), unreadable=tuple(unreadable))

    def tagged(self) -> Snapshot:
        """Read only the ids, owners, states and tags of Muri's jobs, which works where the queue cannot be read."""
        snapshot = read_tagged_jobs(self._commands)
        self._arrays.learn(snapshot.jobs)
        return snapshot

    def _reservation_table(self) -> str:
        return self._commands.run("read the reservations", ["scontrol", "--oneliner", "show", "reservation"])

    def _nodes(self) -> tuple[Node, ...]:
        arguments = ["scontrol", "--all", "--details", "--oneliner", "show", "nodes"]
        return nodes_of_table(self._commands.run("read the nodes", arguments))

    def gpu_removal(self, known: GpuRemoval, place: Place, waiting: Job | None, now_s: float) -> GpuRemoval:
        """Return whether a waiting job's GPUs can be taken away, trying it if `known` is stale."""
        return find_gpu_removal(self._commands, known, place, waiting, now_s)

    def submit(self, job: NewJob) -> int:
        """Submit a batch job as its user and return its id."""
        return self._submissions.submit(job)

    def _update(self, job_id: int, settings: Sequence[str], owner: tuple[int, int] | None = None) -> None:
        name = self._arrays.name(job_id)
        arguments = ["scontrol", "update", f"JobId={name}", *settings]
        if owner is None:
            self._commands.run(f"change job {name}", arguments)
        else:
            self._submissions.change(job_id, owner, arguments)

    def split_tasks(self, job: Job, tasks: Sequence[int]) -> None:
        """Give some of a job array's waiting tasks records of their own: any change of a task does that."""
        name = f"{job.array_job_id}_[{','.join(map(str, tasks))}]"
        settings = [f"JobId={name}", f"AdminComment={job.admin_comment}"]
        self._commands.run(f"give tasks {name} records of their own", ["scontrol", "update", *settings])

    def modify(self, job_id: int, change: JobChange) -> None:
        """Change a pending job; where that is done in its user's name, root checks it and changes the rest."""
        if change.owner is not None:
            self._modify(job_id, change.by_owner)
            self._submissions.check(job_id, change)
            change = change.by_root
        self._modify(job_id, change)

    def _modify(self, job_id: int, change: JobChange) -> None:
        settings = update_settings(change, self._gres_separator)
        if change.has_several_tasks and change.gpu_request is not None:
            # Together with GRES, Slurm takes the least CPUs of a node for all CPUs of the job, too few for its tasks.
            least = next(setting for setting in settings if setting.startswith(_LEAST_CPUS))
            self._update(job_id, [least], change.owner)
            settings.remove(least)
        if not settings:
            return
        try:
            self._update(job_id, settings, change.owner)
        except GatewayError as error:
            if change.gpu_request not in WAYS or not no_such_gres(error):
                raise
            rest = [setting for setting in settings if not setting.startswith("TresPerNode=")]
            self._update(job_id, [*rest, *_NO_FIGURES_PER_GPU], change.owner)
            self._update(job_id, settings, change.owner)

    def hold(self, job_id: int) -> None:
        """Hold a pending job so that its user may release it, too."""
        self._commands.run(f"hold job {job_id}", ["scontrol", "uhold", self._arrays.name(job_id)])

    def release(self, job_id: int) -> None:
        """Release a held job."""
        with passing_over(job_started, job_ended):
            self._commands.run(f"release job {job_id}", ["scontrol", "release", self._arrays.name(job_id)])

    def extend_lease(self, end_s: float) -> None:
        """Withhold the license `muri_gate` until a time, in seconds since the epoch."""
        if tables.extend_lease(self._commands, end_s):
            self._reservations.forget()

    def end_lease(self) -> None:
        """Withhold the license no longer."""
        tables.end_lease(self._commands)
        self._reservations.forget()

    def requeue(self, job_id: int) -> None:
        """End a running job and put it back into the queue; a pending one stays as it is."""
        name = self._arrays.name(job_id)
        with passing_over(job_pending):
            # With "incomplete" Slurm leaves alone a job that has just ended.
            self._commands.run(f"requeue job {job_id}", ["scontrol", "requeue", "incomplete", name])

    def requeue_hold(self, job_id: int) -> None:
        """End a running job, put it back into the queue and hold it; a pending one is held."""
        action = f"requeue job {job_id}"
        try:
            # Without "incomplete" Slurm would run a job again that has just ended.
            self._commands.run(action, ["scontrol", "requeuehold", "incomplete", self._arrays.name(job_id)])
        except GatewayError as err:
            if not job_pending(err):
                raise
            self.hold(job_id)

    def cancel(self, job_id: int) -> None:
        """Cancel a job."""
        with suppress(NoSuchJobError):
            self._commands.run(f"cancel job {job_id}", ["scancel", str(job_id)])

    def gpus_in_use(self) -> tuple[Held, ...]:
        """Return the GPUs of running jobs: a folded host list and Slurm's indices on each of its nodes."""
        show = ["scontrol", "--all", "--details", "--oneliner", "show", "job"]
        return tuple(held_in(self._commands.run("read which GPUs are in use", show)))

    def job_environment(self, job_id: int) -> dict[str, str] | None:
        """Return the environment that a pending job was submitted with, None when it cannot be read."""
        return job_environment(self._state_save_location, self._arrays.files_of(job_id))


def release_of(text: str) -> tuple[int, ...]:
    """Return a version's release, (25, 11) of "25.11.2"; () for an unknown one."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def update_settings(change: JobChange, gres_separator: str = "/") -> list[str]:
    """Return the arguments of `scontrol update job` that make a change; up to Slurm 22.05 it is "gres:gpu"."""
    gres = change.gpu_request
    settings = {
        "TresPerNode": None if gres is None else text_fields.gres_argument(gres, f"gres{gres_separator}"),
        "ReqNodeList": change.required_nodes,
        "NumCPUs": change.cpu_count,
        "CPUsPerTask": change.cpus_per_task,
        _LEAST_CPUS: change.least_cpus,
        "Dependency": change.dependency,
        "MinMemoryNode": change.mem_per_node_mib,
        "MinMemoryCPU": change.mem_per_cpu_mib,
        "TimeLimit": None if change.time_limit_s is None else text_fields.time_limit_text(change.time_limit_s),
        "AdminComment": change.admin_comment,
        "JobName": change.name,
        "StartTime": text_fields.SOON if change.start_now else None,
        "Licenses": change.licenses,
        "Nice": change.nice,
        "OverSubscribe": "YES" if change.oversubscribe else None,
    }
    return [f"{name}={value}" for name, value in settings.items() if value is not None]
