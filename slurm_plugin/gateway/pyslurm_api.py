"""The gateway through pyslurm: Slurm's C API without a process per call."""

import importlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final, Protocol

from muri.installed import is_packaged, what_brings
from muri.slurm_plugin.gateway import tables
from muri.slurm_plugin.gateway.base import (
    CHANGE,
    JOB,
    JOBS,
    NODES,
    RESERVATIONS,
    Calls,
    GatewayError,
    GatewayUnavailableError,
    NoSuchJobError,
    SlurmUnreachableError,
    job_ended,
    job_environment,
    job_started,
    slurm_error,
)
from muri.slurm_plugin.gateway.gpu_removal import find_gpu_removal
from muri.slurm_plugin.gateway.job_details import DetailsReader, untold
from muri.slurm_plugin.gateway.pyslurm_records import Libslurm, change_fields, has_request, job_record
from muri.slurm_plugin.gateway.queue_reader import ArrayRecords
from muri.slurm_plugin.gateway.site_limits import LimitsReader
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.gateway.submit_as import Submissions
from muri.slurm_plugin.gateway.tables import Held, ReservationsReader, nodes_of_table, read_gpus_in_use
from muri.slurm_plugin.gateway.text_fields import read_each
from muri.slurm_plugin.records.cluster import Job, JobChange, JobState, NewJob, Node, Snapshot, Unreadable
from muri.slurm_plugin.records.gpu_removal import GpuRemoval, Place

log = logging.getLogger(__name__)

#: pyslurm's release → releases of libslurm that it was seen to build for and to work with.
COMPATIBLE: Mapping[str, tuple[str, ...]] = {"25.11": ("25.11", "26.05")}

_OR: Final = "or set `gateway: command` in muri.yaml"


def _what_to_do() -> str:
    """Say how a pyslurm comes here that fits."""
    if is_packaged():
        return f"Install Muri's packages for this release of Slurm, {_OR}"
    return (
        "Rebuild pyslurm against the libslurm of this machine (`pip install --force-reinstall --no-cache-dir "
        f"--no-binary :all: pyslurm==<Slurm's release>.*`), {_OR}"
    )


class NoPyslurmError(GatewayUnavailableError):
    """pyslurm is not installed, which is normal: for most releases of Slurm there is none."""


class Helper(Protocol):
    """What pyslurm cannot say, done some other way; the command gateway fits."""

    def queue(self) -> Snapshot:
        """Read the jobs alone."""
        ...

    def one_job(self, job_id: int) -> Snapshot:
        """Read one job, of an array's id all its records."""
        ...

    def show_job(self, job_id: int) -> bytes | bytearray:
        """Return what `scontrol show job` prints of one job, or of all for 0."""
        ...

    def learn(self, jobs: Iterable[Job]) -> None:
        """Take note of the queue, which says which record of an array a job's id means."""
        ...

    def modify(self, job_id: int, change: JobChange) -> None:
        """Change a pending job."""
        ...

    def split_tasks(self, job: Job, tasks: Sequence[int]) -> None:
        """Give some of a job array's waiting tasks records of their own."""
        ...

    def hold(self, job_id: int) -> None:
        """Hold a pending job so that its user may release it, too."""
        ...

    def requeue(self, job_id: int) -> None:
        """Requeue a job that has not ended."""
        ...

    def requeue_hold(self, job_id: int) -> None:
        """Requeue and hold a job that has not ended."""
        ...


class PyslurmGateway:
    """Speaks to slurmctld through pyslurm.

    Jobs are submitted, and the licence is withheld, through Slurm's commands. Five more things pyslurm cannot
    express. `helper` does them; without it their weaker forms are used:

    - A few options of sbatch, such as --gpu-bind and --mem-per-gpu, and on a cluster without slurmdbd GPUs asked for
      with --gpus or --gpus-per-socket, are not shown. The helper is asked once for each job with Muri's tag.
      Otherwise: no such option, 0 GPUs.
    - The least number of CPUs per node, which sbatch sets from --cpus-per-task; the helper then makes the whole
      change. Otherwise: a job keeps it, and gets no fewer CPUs however few `JobChange.cpu_count` says.
    - A hold that the job's user may lift. Otherwise: a hold that only an administrator may lift.
    - A requeue that spares a job which has just ended. Otherwise: a look at its state first.
    - A job array's task that has no record of its own. Otherwise: no task gets one, and the array waits.

    Args:
        helper: Another way to speak to the same slurmctld.
        commands: How commands are run, which count what the helper asks as well where it has the same ones.

    Raises:
        GatewayUnavailableError: pyslurm is missing or does not fit this Slurm.
        SlurmUnreachableError: slurmctld does not answer.
    """

    name = "pyslurm"

    def __init__(self, helper: Helper | None = None, commands: SlurmCommands | None = None) -> None:
        os.environ.setdefault("SLURM_BITSTR_LEN", "0")  # else libslurm cuts off the list of an array's waiting tasks
        self._pyslurm = import_pyslurm()
        self._libslurm = Libslurm()
        check_library(str(self._pyslurm.__version__), self._libslurm.release())
        with self._slurm("read Slurm's configuration"):
            config = self._pyslurm.slurmctld.Config.load()
            self._cluster = str(config.cluster_name)
            self._slurm_version = str(config.version)
            self._state_save_location = str(config.state_save_location)
        check_controller(self._slurm_version, self._libslurm.release())
        self._helper = helper
        self._commands = commands or SlurmCommands()
        self._details = None if helper is None else DetailsReader(helper.show_job)
        self._limits = LimitsReader(self._commands)
        self._reservations = ReservationsReader(self._reservation_table)
        self._submissions = Submissions(self._commands, self._limits.forget)
        self._partitions: dict[str, tuple[str, ...]] = {}
        self._arrays = ArrayRecords()

    @property
    def slurm_calls(self) -> Calls:
        """How often Slurm was asked, by kind."""
        return self._commands.calls

    @property
    def slurm_version(self) -> str:
        """Return slurmctld's version."""
        return self._slurm_version

    def _load_partitions(self) -> dict[str, tuple[str, ...]]:
        self.slurm_calls.update((NODES, "partitions"))
        with self._slurm("read the nodes"):
            nodes = self._pyslurm.Nodes.load()
            return {node.name: tuple(sorted(node.partitions)) for node in nodes.values()}

    @contextmanager
    def _slurm(self, action: str) -> Iterator[None]:
        """Turn what pyslurm raises into Muri's errors."""
        try:
            yield
        except self._pyslurm.RPCError as err:
            raise slurm_error(action, str(err)) from err
        except (ValueError, KeyError, OverflowError) as err:
            raise GatewayError(f"cannot {action}: pyslurm refuses a value: {err}") from err

    def snapshot(self) -> Snapshot:
        """Read all jobs and nodes in two bulk RPCs; reservations and the site's limits only now and then."""
        limits = self._limits.read()  # first, for the queue's records depend on what jobs get by default
        queue, nodes = self.queue(), self._nodes()
        return replace(queue, nodes=nodes, limits=limits, reservations=self._reservations.read(nodes))

    def queue(self) -> Snapshot:
        """Read the jobs alone."""
        taken_s = time.time()
        loaded = self._load_jobs()
        if loaded is None and self._helper is not None:
            log.info("pyslurm cannot decode the queue; it is read through Slurm's commands")
            queue = self._helper.queue()
            self._arrays.learn(queue.jobs)
            return queue
        jobs, unreadable = self._records(loaded or [], taken_s)
        self._arrays.learn(jobs)
        if self._helper is not None:
            self._helper.learn(jobs)
        return Snapshot(
            taken_s=taken_s,
            cluster=self._cluster,
            slurm_version=self._slurm_version,
            jobs=tuple(sorted(jobs, key=lambda job: job.job_id)),
            nodes=(),
            unreadable=tuple(unreadable),
        )

    def one_job(self, job_id: int) -> Snapshot:
        """Read one job, of an array's id all its records; pyslurm alone shows only one of an array's."""
        if self._helper is None:
            queue = self.queue()
            jobs = tuple(job for job in queue.jobs if job_id in {job.job_id, job.array_job_id})
            return replace(queue, jobs=jobs)
        found = self._helper.one_job(job_id)
        self._arrays.learn(found.jobs)
        return found

    def _records(self, loaded: Sequence[Any], taken_s: float) -> tuple[list[Job], list[Unreadable]]:
        """Convert pyslurm's records, with what only the helper can tell of tagged jobs."""
        if self._details is None:
            return read_each(loaded, lambda job: job_record(job, taken_s), lambda job: int(job.id))
        tagged = {int(job.id) for job in loaded if has_request(job)}
        told = self._details.read(dict.fromkeys(tagged))
        unknown = untold(sorted(tagged), told)
        left_out = {each.job_id for each in unknown}
        readable = [job for job in loaded if int(job.id) not in left_out] if left_out else loaded
        defaults = self._limits.partitions
        jobs, unreadable = read_each(
            readable, lambda job: job_record(job, taken_s, told.get(int(job.id)), defaults), lambda job: int(job.id)
        )
        return jobs, [*unknown, *unreadable]

    def _load_jobs(self) -> list[Any] | None:
        """Return pyslurm's records, None where it fails over a text that a helper can read."""
        self.slurm_calls[JOBS] += 1
        with self._slurm("read the jobs"):
            try:
                return list(self._pyslurm.Jobs.load().values())
            except UnicodeDecodeError:
                if self._helper is None:
                    raise
                return None

    def _reservation_table(self) -> str:
        self.slurm_calls[RESERVATIONS] += 1
        try:
            return self._libslurm.reservation_table()
        except OSError as err:
            raise slurm_error("read the reservations", err.strerror or str(err)) from err

    def _nodes(self) -> tuple[Node, ...]:
        self.slurm_calls[NODES] += 1
        try:
            table = self._libslurm.node_table()
        except OSError as err:
            raise slurm_error("read the nodes", err.strerror or str(err)) from err
        nodes = nodes_of_table(table, self._partitions)
        if any(node.name not in self._partitions for node in nodes):  # the first time, and after nodes were added
            self._partitions = self._load_partitions()
            nodes = nodes_of_table(table, self._partitions)
        return nodes

    def gpu_removal(self, known: GpuRemoval, place: Place, waiting: Job | None, now_s: float) -> GpuRemoval:
        """Return whether a waiting job's GPUs can be taken away, trying it where `known` does not hold."""
        return find_gpu_removal(self._commands, known, place, waiting, now_s)

    def submit(self, job: NewJob) -> int:
        """Submit a batch job as its user and return its id."""
        return self._submissions.submit(job)

    def extend_lease(self, end_s: float) -> None:
        """Withhold the licence `muri_gate` until a time, in seconds since the epoch."""
        if tables.extend_lease(self._commands, end_s):
            self._reservations.forget()

    def end_lease(self) -> None:
        """Withhold the licence no longer."""
        tables.end_lease(self._commands)
        self._reservations.forget()

    def modify(self, job_id: int, change: JobChange) -> None:
        """Change a pending job, in one RPC; the GPUs of several tasks take two."""
        if self._helper is not None and (change.least_cpus is not None or change.owner is not None):
            self._helper.modify(job_id, change)
        elif fields := change_fields(change):
            with self._slurm(f"change job {job_id}"):
                self._job(job_id).modify(self._pyslurm.JobSubmitDescription(**fields))

    def split_tasks(self, job: Job, tasks: Sequence[int]) -> None:
        """Give some of a job array's waiting tasks records of their own."""
        if self._helper is None:
            raise GatewayError(f"cannot give tasks of array {job.array_job_id} records of their own without scontrol")
        self._helper.split_tasks(job, tasks)

    def _job(self, job_id: int) -> Any:
        """Return a job to change."""
        self.slurm_calls[CHANGE] += 1
        return self._pyslurm.Job(job_id)

    def hold(self, job_id: int) -> None:
        """Hold a pending job."""
        if self._helper is not None:
            self._helper.hold(job_id)
            return
        with self._slurm(f"hold job {job_id}"):
            self._job(job_id).hold()

    def release(self, job_id: int) -> None:
        """Release a held job."""
        try:
            with self._slurm(f"release job {job_id}"):
                self._job(job_id).release()
        except GatewayError as err:
            if not (job_started(err) or job_ended(err)):
                raise

    def requeue(self, job_id: int) -> None:
        """End a running job and put it back into the queue; a pending one stays as it is."""
        if self._helper is not None:
            self._helper.requeue(job_id)
        elif self._state(job_id) is not JobState.PENDING and self._still_there(job_id):
            with self._slurm(f"requeue job {job_id}"):
                self._job(job_id).requeue()

    def requeue_hold(self, job_id: int) -> None:
        """End a running job, put it back into the queue and hold it; a pending one is held."""
        if self._helper is not None:
            self._helper.requeue_hold(job_id)
        elif self._state(job_id) is JobState.PENDING:
            self.hold(job_id)
        elif self._still_there(job_id):  # Slurm would run an ended job again
            with self._slurm(f"requeue job {job_id}"):
                self._job(job_id).requeue(hold=True)

    def cancel(self, job_id: int) -> None:
        """Cancel a job."""
        try:
            with self._slurm(f"cancel job {job_id}"):
                self._job(job_id).cancel()
        except SlurmUnreachableError:
            raise
        except NoSuchJobError:
            log.debug("job %d: gone before it was cancelled", job_id)
        except GatewayError:
            # pyslurm looks at errno even when the call succeeded, and may find an old one there.
            if self._still_there(job_id):
                raise

    def _still_there(self, job_id: int) -> bool:
        with suppress(NoSuchJobError):
            state = self._state(job_id)
            return state.is_active and state is not JobState.COMPLETING
        return False

    def _state(self, job_id: int) -> JobState:
        self.slurm_calls[JOB] += 1
        with self._slurm(f"read job {job_id}"):
            return job_record(self._pyslurm.Job.load(job_id), time.time()).state

    def gpus_in_use(self) -> tuple[Held, ...]:
        """Return which GPUs running jobs have: a folded host list and Slurm's indices on each of its nodes."""
        return read_gpus_in_use(self._commands)

    def job_environment(self, job_id: int) -> dict[str, str] | None:
        """Return the environment that a pending job was submitted with, None when it cannot be read."""
        return job_environment(self._state_save_location, self._arrays.files_of(job_id))


def import_pyslurm() -> Any:
    """Return the module pyslurm.

    Raises:
        NoPyslurmError: It is missing.
        GatewayUnavailableError: It cannot be loaded on this machine.
    """
    try:
        return importlib.import_module("pyslurm")
    except ModuleNotFoundError as err:
        if err.name != "pyslurm":
            raise GatewayUnavailableError(f"pyslurm cannot be imported: {err}. {_what_to_do()}") from err
        raise NoPyslurmError(
            "pyslurm is not installed for this Python; Slurm's commands do the same (`gateway: command`). Where one "
            f"fits this Slurm: {what_brings('slurm', 'muri-controller')}"
        ) from err
    except (ImportError, OSError, AttributeError) as err:
        raise GatewayUnavailableError(f"pyslurm cannot be imported: {err}. {_what_to_do()}") from err


def release(version: str) -> str:
    """Return a version's release: "25.11" of "25.11.2"."""
    return ".".join(version.split(".")[:2])


def check_library(pyslurm_version: str, library: str) -> None:
    """Refuse a pyslurm that was not made for the libslurm in this process.

    The structures that both share differ from release to release; a mismatch reads wrong memory. The dynamic
    linker catches most of them, for libslurm's file name changes as well.

    Args:
        pyslurm_version: Such as "25.11.2".
        library: libslurm's release such as "26.05", "" when it is newer than Muri and cannot be judged.

    Raises:
        GatewayUnavailableError: They don't fit.
    """
    fits = COMPATIBLE.get(release(pyslurm_version), (release(pyslurm_version),))
    if library and library not in fits:
        raise GatewayUnavailableError(
            f"pyslurm {pyslurm_version} was made for Slurm {' or '.join(fits)}, but libslurm here is of Slurm "
            f"{library}. {_what_to_do()}"
        )


def check_controller(slurmctld_version: str, library: str) -> None:
    """Refuse a libslurm newer than slurmctld, which Slurm does not support.

    Raises:
        GatewayUnavailableError: It is newer.
    """
    if library and _order(slurmctld_version) < _order(library):
        raise GatewayUnavailableError(
            f"libslurm is of Slurm {library}, newer than slurmctld {slurmctld_version}, and Slurm serves clients of "
            "its own or an older release only. Install the client packages of slurmctld's release, or set "
            "`gateway: command` in muri.yaml and give it commands of that release"
        )


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release(version).split(".") if part.isdigit())
