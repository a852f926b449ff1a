"""The gateway through Slurm's commands: for sites where no pyslurm version fits Slurm."""

import logging
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muri.slurm_plugin.gateway import json_records, text_fields
from muri.slurm_plugin.gateway.base import (
    GatewayError,
    GatewayUnavailableError,
    NoSuchJobError,
    SlurmUnreachableError,
    check_new_job,
    explicit_environment,
    job_ended,
    job_environment,
    job_pending,
    job_started,
    slurm_error,
)
from muri.slurm_plugin.gateway.site_limits import LimitsReader, config_settings
from muri.slurm_plugin.records.cluster import GPUS_CAN_BE_TAKEN_AWAY, JobChange, NewJob, Snapshot

log = logging.getLogger(__name__)

#: The first Slurm whose squeue and sinfo print the JSON that json_records reads.
_OLDEST = (22, 5)

#: Variables of the caller that the commands get. All SBATCH_*, SLURM_* and SQUEUE_* but the first two would
#: act as options.
_PASSED = ("SLURM_CONF", "SLURM_JWT", "PATH", "HOME", "TZ", "LD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class SlurmCommands:
    """A way to run Slurm's commands.

    Attributes:
        timeout_s: How long one command may take. Slurm's own MessageTimeout ends a hanging one earlier.
    """

    timeout_s: float = 60.0

    def run(self, action: str, arguments: Sequence[str], stdin: str = "", environment: bytes = b"") -> str:
        """Run one command and return its output.

        Args:
            action: What it is for, such as "hold job 12"; part of the message when it fails.
            arguments: The command's name and its arguments.
            stdin: Text for its standard input.
            environment: When not empty, the job's environment for sbatch, NAME=value ended by NUL each; sbatch
                reads it from a file in memory.

        Raises:
            GatewayUnavailableError: There is no such command.
            SlurmUnreachableError: slurmctld does not answer, or not in time.
            NoSuchJobError: slurmctld does not know the job.
            GatewayError: Slurm refused.
        """
        with _memory_file(environment) as descriptors:
            # Slurm 26.05 reads the file only together with ALL; neither version then adds the caller's variables.
            options = [part for fd in descriptors for part in ("--export=ALL", f"--export-file={fd}")]
            try:
                done = subprocess.run(
                    [arguments[0], *options, *map(encoded, arguments[1:])],
                    input=encoded(stdin),
                    capture_output=True,
                    check=False,
                    timeout=self.timeout_s,
                    env=command_environment(),
                    pass_fds=descriptors,
                )
            except FileNotFoundError as err:
                raise GatewayUnavailableError(
                    f"cannot {action}: the command {arguments[0]!r} is not in PATH. Install Slurm's client commands"
                ) from err
            except subprocess.TimeoutExpired as err:
                raise SlurmUnreachableError(
                    f"cannot {action}: `{arguments[0]}` did not end within {self.timeout_s:g} s; is slurmctld running?"
                ) from err
        if done.returncode != 0:
            raise slurm_error(action, done.stderr.decode("utf-8", "replace"))
        return decoded(done.stdout)


def encoded(text: str) -> bytes:
    """Return the bytes that `decoded` read a text from, whatever the locale is."""
    return text.encode("utf-8", "surrogateescape")


def decoded(output: bytes) -> str:
    """Return a text that holds every byte of what Slurm printed: users write theirs in any encoding."""
    return output.decode("utf-8", "surrogateescape")


def command_environment() -> dict[str, str]:
    """Return the environment in which Slurm's commands run."""
    passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
    return passed | {"LC_ALL": "C.UTF-8"}


@contextmanager
def _memory_file(content: bytes) -> "Iterator[tuple[int, ...]]":
    if not content:
        yield ()
        return
    descriptor = os.memfd_create("environment", 0)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as stream:
            stream.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield (descriptor,)
    finally:
        os.close(descriptor)


class CommandGateway:
    """Speaks to slurmctld through squeue, sinfo, scontrol, sbatch and scancel.

    A snapshot is `squeue --json` (one RPC) and `scontrol show nodes --json`, which itself asks for the nodes and
    the partitions (two RPCs); their number does not depend on the queue's length. The site's limits are read besides,
    some minutes apart.

    Args:
        commands: How commands are run.

    Raises:
        GatewayUnavailableError: The commands are missing or too old.
        SlurmUnreachableError: slurmctld does not answer.
    """

    name = "command"

    def __init__(self, commands: SlurmCommands | None = None) -> None:
        self._commands = commands or SlurmCommands()
        settings = config_settings(self._commands.run("read the configuration", ["scontrol", "show", "config"]))
        self._limits = LimitsReader(self._commands)
        self._cluster = settings.get("ClusterName", "")
        self._state_save_location = settings.get("StateSaveLocation", "")
        self._slurm_version = settings.get("SLURM_VERSION", "")
        if _version(self._slurm_version) < _OLDEST:
            raise GatewayUnavailableError(
                f"Slurm {self._slurm_version or 'of an unknown version'} is too old: Muri needs the JSON output of "
                "Slurm 22.05 or newer"
            )
        self._node_command = json_records.node_command(_version(self._slurm_version))
        self._gres_separator = ":" if _version(self._slurm_version) < (22, 11) else "/"

    @property
    def slurm_version(self) -> str:
        """Return slurmctld's version."""
        return self._slurm_version

    def snapshot(self) -> Snapshot:
        """Read all jobs and nodes."""
        taken_s = time.time()
        queue = self._json("read the jobs", ["squeue", "--all", "--states=all", "--json"])
        nodes = self._json("read the nodes", self._node_command)
        return Snapshot(
            taken_s=taken_s,
            cluster=self._cluster,
            slurm_version=self._slurm_version,
            jobs=tuple(sorted(json_records.jobs(queue, taken_s), key=lambda job: job.job_id)),
            nodes=tuple(sorted(json_records.nodes(nodes), key=lambda node: node.name)),
            limits=self._limits.read(),
        )

    def _json(self, action: str, arguments: Sequence[str]) -> Mapping[str, object]:
        return json_records.parse_document(self._commands.run(action, arguments), " ".join(arguments))

    def gpu_counts(self, job_ids: list[int]) -> dict[int, int]:
        """Return how many GPUs each of these jobs asks for, in one bulk RPC."""
        queue = self._json("read the jobs", ["squeue", "--all", "--states=all", "--json"])
        wanted = set(job_ids)
        return {job.job_id: job.gpu_count for job in json_records.jobs(queue, time.time()) if job.job_id in wanted}

    def submit(self, job: NewJob) -> int:
        """Submit a batch job as its user and return its id.

        sbatch cannot set an AdminComment: such a job is submitted held, then commented, then released. Until
        then the same text stands in its Comment, so that a job left behind by a crash can be recognised.
        """
        check_new_job(job)
        job_id = self._sbatch(job)
        if not job.admin_comment:
            return job_id
        try:
            self._update(job_id, [f"AdminComment={job.admin_comment}", "Comment="])
            self._commands.run(f"release job {job_id}", ["scontrol", "release", str(job_id)])
        except GatewayError:
            with suppress(GatewayError):
                self.cancel(job_id)
            raise
        return job_id

    def _sbatch(self, job: NewJob) -> int:
        action = f"submit job {job.name!r}"
        items = (f"{name}={value}\0" for name, value in explicit_environment(job).items())
        environment = encoded("".join(items))
        output = self._commands.run(action, sbatch_arguments(job), without_directives(job.script), environment)
        job_id = output.strip().split(";")[0]
        if not job_id.isdigit():
            raise GatewayError(f"cannot {action}: sbatch printed {output!r} instead of a job id")
        return int(job_id)

    def _update(self, job_id: int, settings: Sequence[str]) -> None:
        self._commands.run(f"change job {job_id}", ["scontrol", "update", f"JobId={job_id}", *settings])

    def modify(self, job_id: int, change: JobChange) -> None:
        """Change a pending job."""
        if _takes_gpus_away(change) and _version(self._slurm_version) < GPUS_CAN_BE_TAKEN_AWAY:
            raise GatewayError(
                f"cannot change job {job_id}: Slurm {self._slurm_version} accepts {change.gpu_request!r} but keeps the "
                "job's GPUs, so it cannot share another's: jobs run alone here. Grouping needs Slurm 23.02 or newer"
            )
        if settings := update_settings(change, self._gres_separator):
            self._update(job_id, settings)

    def set_least_cpus(self, job_id: int, change: JobChange) -> None:
        """Set only how many CPUs a pending job needs on each of its nodes, as `modify` would."""
        if (least := _least_cpus(change)) is not None:
            self._update(job_id, [f"MinCPUsNode={least}"])

    def hold(self, job_id: int) -> None:
        """Hold a pending job so that its user may release it, too."""
        self._commands.run(f"hold job {job_id}", ["scontrol", "uhold", str(job_id)])

    def release(self, job_id: int) -> None:
        """Release a held job."""
        try:
            self._commands.run(f"release job {job_id}", ["scontrol", "release", str(job_id)])
        except GatewayError as err:
            if not (job_started(err) or job_ended(err)):
                raise

    def requeue_hold(self, job_id: int) -> None:
        """End a running job, put it back into the queue and hold it; a pending one is held."""
        action = f"requeue job {job_id}"
        try:
            # Without "incomplete" Slurm would run a job again that has just ended.
            self._commands.run(action, ["scontrol", "requeuehold", "incomplete", str(job_id)])
        except GatewayError as err:
            if not job_pending(err):
                raise
            self.hold(job_id)

    def cancel(self, job_id: int) -> None:
        """Cancel a job."""
        try:
            self._commands.run(f"cancel job {job_id}", ["scancel", str(job_id)])
        except SlurmUnreachableError:
            raise
        except NoSuchJobError:
            log.debug("job %d: gone before it was cancelled", job_id)

    def batch_script(self, job_id: int) -> str:
        """Return the text of a job's batch script."""
        action = f"read the script of job {job_id}"
        script = self._commands.run(action, ["scontrol", "write", "batch_script", str(job_id), "-"])
        if not script:
            raise NoSuchJobError(f"job {job_id} has no batch script")
        return script

    def job_environment(self, job_id: int) -> dict[str, str] | None:
        """Return the environment that a pending job was submitted with, None when it cannot be read."""
        return job_environment(self._state_save_location, job_id)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def update_settings(change: JobChange, gres_separator: str = "/") -> list[str]:
    """Return the arguments of `scontrol update job` that make a change.

    Args:
        change: The change.
        gres_separator: What stands between "gres" and "gpu": "/", up to Slurm 22.05 ":".
    """
    settings = {
        "TresPerNode": None if change.gpu_request is None else _gres(change.gpu_request, gres_separator),
        "ReqNodeList": change.required_nodes,
        "NumCPUs": change.cpu_count,
        "CPUsPerTask": change.cpus_per_task,
        "MinCPUsNode": _least_cpus(change),
        "Dependency": change.dependency,
        "MinMemoryNode": change.mem_per_node_mib,
        "MinMemoryCPU": change.mem_per_cpu_mib,
        "TimeLimit": None if change.time_limit_s is None else _time_limit(change.time_limit_s),
        "AdminComment": change.admin_comment,
        "StartTime": "now" if change.start_now else None,
    }
    return [f"{name}={value}" for name, value in settings.items() if value is not None]


def _takes_gpus_away(change: JobChange) -> bool:
    return change.gpu_request is not None and not text_fields.gpu_total(text_fields.gres_counts(change.gpu_request))


def _least_cpus(change: JobChange) -> int | None:
    """CPUs on each node that the job cannot do without; sbatch sets them from --cpus-per-task."""
    return change.cpus_per_task if change.cpus_per_task is not None else change.cpu_count


def _gres(request: str, separator: str) -> str:
    counts = text_fields.gres_counts(request)
    if not counts:
        raise GatewayError(f"GRES request {request!r} is malformed: write for example gres/gpu:1 or gres/gpu:a100:2")
    return text_fields.request_text(counts).replace("gres/", f"gres{separator}")


def _time_limit(time_limit_s: int) -> str:
    return str(-(-time_limit_s // 60)) if time_limit_s else "UNLIMITED"


def sbatch_arguments(job: NewJob) -> list[str]:
    """Return the sbatch command line that submits a job, its script on standard input."""
    counts = text_fields.gres_counts(job.gpu_request)
    arguments = {
        "uid": job.uid,
        "gid": job.gid,
        "job-name": job.name,
        "partition": job.partition,
        "account": job.account or None,
        "qos": job.qos or None,
        "chdir": job.work_dir,
        "gres": ",".join(f"{name}:{count}" for name, count in sorted(counts.items())) or None,
        "nodes": job.node_count,
        "ntasks": job.node_count * job.tasks_per_node,
        "ntasks-per-node": job.tasks_per_node if job.tasks_per_node > 1 else None,
        "cpus-per-task": job.cpu_count,
        "mem": f"{job.mem_per_node_mib}M" if job.mem_per_node_mib else None,
        "time": _time_limit(job.time_limit_s) if job.time_limit_s else None,
        "nodelist": job.required_nodes or None,
        "output": job.output,
        "input": "/dev/null",
        "comment": job.admin_comment or None,
    }
    options = [f"--{name}={value}" for name, value in arguments.items() if value is not None]
    hold = ["--hold"] if job.admin_comment else []
    return ["sbatch", "--parsable", "--requeue" if job.requeue else "--no-requeue", *hold, *options]


def without_directives(script: str) -> str:
    """Switch off a script's "#SBATCH" lines, keeping every line in its place.

    A job submitted for Muri is what NewJob says, and pyslurm does not read these lines either.
    """
    return re.sub(r"^#(SBATCH|PBS|BSUB)", r"# \1", script, flags=re.MULTILINE)


if TYPE_CHECKING:
    from collections.abc import Iterator
