"""The gateway through pyslurm: Slurm's C API without a process per call."""

import importlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from muri.pythons import is_packaged, what_brings
from muri.slurm_plugin.gateway.base import (
    CHANGE,
    JOB,
    JOBS,
    NODES,
    RESERVATIONS,
    GatewayError,
    GatewayUnavailableError,
    NoSuchJobError,
    SlurmUnreachableError,
    job_ended,
    job_started,
    no_such_gres,
    passing_over,
    slurm_error,
)
from muri.slurm_plugin.gateway.commands import CommandGateway, release_of
from muri.slurm_plugin.gateway.pyslurm_records import Libslurm, change_fields, has_request, job_record
from muri.slurm_plugin.gateway.queue_reader import DetailsReader
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.gateway.tables import nodes_of_table
from muri.slurm_plugin.records.cluster import JobChange, JobState, Node, Snapshot

log = logging.getLogger(__name__)

#: pyslurm's release → releases of libslurm that it was seen to build for and to work with.
COMPATIBLE: Mapping[str, tuple[str, ...]] = {"25.11": ("25.11", "26.05")}

_OR: Final = "or set `gateway: command` in muri.yaml"


def _what_to_do() -> str:
    """Return how to install a pyslurm that fits."""
    if is_packaged():
        return f"Install Muri's packages for this release of Slurm, {_OR}"
    return (
        "Rebuild pyslurm against the libslurm of this machine (`pip install --force-reinstall --no-cache-dir "
        f"--no-binary :all: pyslurm==<Slurm's release>.*`), {_OR}"
    )


class NoPyslurmError(GatewayUnavailableError):
    """pyslurm is not installed, which is normal: for most releases of Slurm there is none."""


class PyslurmGateway(CommandGateway):
    """Speaks to slurmctld through pyslurm, and through Slurm's commands for what pyslurm cannot express.

    Those are submissions, the lease, holds that a job's user may lift, requeues that spare a job which has just ended,
    records for single tasks of a job array, and changes of the least number of CPUs per node, which sbatch sets from
    --cpus-per-task. A few options of sbatch, such as --gpu-bind and --mem-per-gpu, and on a cluster without slurmdbd
    GPUs asked for with --gpus or --gpus-per-socket, pyslurm does not show: `scontrol show job` is asked once for each
    job with Muri's tag.

    Raises:
        GatewayUnavailableError: pyslurm is missing or does not fit this Slurm, or the commands are missing.
        SlurmUnreachableError: slurmctld does not answer.
    """

    name = "pyslurm"

    def __init__(self, commands: SlurmCommands | None = None) -> None:
        os.environ.setdefault("SLURM_BITSTR_LEN", "0")  # else libslurm cuts off the list of an array's waiting tasks
        self._pyslurm = import_pyslurm()
        self._libslurm = Libslurm()
        check_library(str(self._pyslurm.__version__), self._libslurm.release())
        super().__init__(commands)
        check_controller(self.slurm_version, self._libslurm.release())
        self._details = DetailsReader(self.show_job)
        self._partitions: dict[str, tuple[str, ...]] = {}

    @contextmanager
    def _slurm(self, action: str) -> Iterator[None]:
        """Turn errors of pyslurm and libslurm into Muri's."""
        try:
            yield
        except self._pyslurm.RPCError as err:
            raise slurm_error(action, str(err)) from err
        except OSError as err:
            raise slurm_error(action, err.strerror or str(err)) from err
        except (ValueError, KeyError, OverflowError) as err:
            raise GatewayError(f"cannot {action}: pyslurm refuses a value: {err}") from err

    def queue(self) -> Snapshot:
        """Read only the jobs."""
        taken_s = time.time()
        self.slurm_calls[JOBS] += 1
        with self._slurm("read the jobs"):
            try:
                loaded = list(self._pyslurm.Jobs.load().values())
            except UnicodeDecodeError:
                log.info("pyslurm cannot decode the queue; it is read through Slurm's commands")
                return super().queue()
        tagged = sorted(int(job.id) for job in loaded if has_request(job))
        defaults = self._limits.partitions
        jobs, unreadable = self._details.jobs_of(
            loaded,
            dict.fromkeys(tagged),
            lambda job, details: job_record(job, taken_s, details, defaults),
            lambda job: int(job.id),
        )
        return self._snapshot_of(jobs, unreadable, taken_s)

    def _reservation_table(self) -> str:
        self.slurm_calls[RESERVATIONS] += 1
        with self._slurm("read the reservations"):
            return self._libslurm.reservation_table()

    def _nodes(self) -> tuple[Node, ...]:
        self.slurm_calls[NODES] += 1
        with self._slurm("read the nodes"):
            table = self._libslurm.node_table()
            nodes = nodes_of_table(table, self._partitions)
            if any(node.name not in self._partitions for node in nodes):  # the first time, and after nodes were added
                self.slurm_calls.update((NODES, "partitions"))
                loaded = self._pyslurm.Nodes.load().values()
                self._partitions = {node.name: tuple(sorted(node.partitions)) for node in loaded}
                nodes = nodes_of_table(table, self._partitions)
        return nodes

    def modify(self, job_id: int, change: JobChange) -> None:
        """Change a pending job, in one RPC; the GPUs of several tasks, or with figures for each of them, take more."""
        if change.least_cpus is None and change.owner is None and (fields := change_fields(change)):
            with passing_over(no_such_gres), self._slurm(f"change job {job_id}"):
                self._job(job_id).modify(self._pyslurm.JobSubmitDescription(**fields))
                return
        super().modify(job_id, change)

    def _job(self, job_id: int) -> Any:
        """Return a job to change."""
        self.slurm_calls[CHANGE] += 1
        return self._pyslurm.Job(job_id)

    def release(self, job_id: int) -> None:
        """Release a held job."""
        with passing_over(job_started, job_ended), self._slurm(f"release job {job_id}"):
            self._job(job_id).release()

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
            if self._is_active(job_id):
                raise

    def _is_active(self, job_id: int) -> bool:
        self.slurm_calls[JOB] += 1
        try:
            with self._slurm(f"read job {job_id}"):
                state = job_record(self._pyslurm.Job.load(job_id), time.time()).state
        except NoSuchJobError:
            return False
        return state.is_active and state is not JobState.COMPLETING


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

    The structures that both share differ from release to release; a mismatch reads wrong memory. The dynamic linker
    catches most of them, for libslurm's file name changes as well.

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
    if library and release_of(slurmctld_version) < release_of(library):
        raise GatewayUnavailableError(
            f"libslurm is of Slurm {library}, newer than slurmctld {slurmctld_version}, and Slurm serves clients of "
            "its own or an older release only. Install the client packages of slurmctld's release, or set "
            "`gateway: command` in muri.yaml and give it commands of that release"
        )
