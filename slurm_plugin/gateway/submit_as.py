"""Submits and changes a batch job as its user: Slurm refuses to Muri whatever it refuses to the user.

sbatch or scontrol runs in a process that has become the user before it reads anything: no capability, no way back to
root, none of the controller's environment. That process is the user's, who may stop it or forge its output. So its
output is not trusted: the job that it names is looked up before root touches it.
"""

import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Final

from muri.slurm_plugin.gateway import text_fields
from muri.slurm_plugin.gateway.base import (
    SUBMISSION,
    GatewayError,
    NoSuchJobError,
    SubmissionTimeoutError,
    check_new_job,
    first_line,
    job_ended,
    job_started,
    passing_over,
)
from muri.slurm_plugin.gateway.queue_reader import read_job
from muri.slurm_plugin.gateway.slurm_commands import (
    SlurmCommands,
    command_environment,
    decoded,
    encoded,
    not_started,
    signals_kept_off,
)
from muri.slurm_plugin.records.cluster import Job, JobChange, JobState, NewJob
from muri.slurm_plugin.records.comment_tags import DRY_RUN_PREFIX, PILOT_PREFIX, STATE_PREFIX
from muri.slurm_plugin.records.limits import is_limit_refusal

_KEPT_FROM_USERS: Final = ("SLURM_JWT", "HOME")
"""Variables of the controller that are not the user's to read or to live with."""

_MOST_OUTPUT: Final = 64 * 1024
"""Bytes that a pipe holds: a process that writes more waits until the time limit."""

_CHILD_ENDS_WITHIN_S: Final = 20.0
_KILLED_WITHIN_S: Final = 5.0
_NONE_FOR_S: Final = 300.0

_LEAST_ENVIRONMENT: Final = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
"""Of a job without any: Slurm would fill in the caller's."""

_HELD_BY_USER: Final = "JobHeldUser"
"""The reason of a job submitted with --hold. No user can turn the reason of an administrator's hold into it."""

_CLOCK_TOLERANCE_S: Final = 5.0
"""Submit times are whole seconds, and slurmctld's time is asked for a moment before."""

_NOW: Final = re.compile(r"Configuration data as of (\d{1,12})\n")
"""How `scontrol show config` begins: with slurmctld's time."""

_JOB_ID: Final = re.compile(r"(\d{1,10})(?:;\S*)?\s*\Z", re.ASCII)


class Submissions:
    """Submits jobs as their users, and for a while no more for one whose process did not end in time.

    Such a user has stopped it, perhaps: each further one would take as long from the cycle that all users share.

    Args:
        commands: Runs commands.
        at_limit: Called when a limit was in the way: the known limits of the site may be out of date.
        clock: Tells the time.
    """

    def __init__(
        self, commands: SlurmCommands, at_limit: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._commands = commands
        self._at_limit = at_limit
        self._clock = clock
        self._again_s: dict[int, float] = {}

    def submit(self, job: NewJob) -> int:
        """Submit a batch job as its user and return its id.

        Raises:
            SubmissionTimeoutError: A process of the user's did not end in time, now or not long ago.
            GatewayError: As `submit` says.
        """
        with self._as_user(f"submit job {job.name!r}", job.uid):
            return submit(self._commands, job)

    def change(self, job_id: int, owner: tuple[int, int], arguments: Sequence[str]) -> None:
        """Run `scontrol update` of a job as its user.

        Raises:
            NoSuchJobError: It is gone.
            SubmissionTimeoutError: A process of the user's did not end in time, now or not long ago.
            GatewayError: Slurm refused.
        """
        action = f"change job {job_id} as its user"
        as_user = [*become(*owner, os.geteuid(), action), *arguments]
        shown = ("--oneliner", "show", "job", str(job_id))
        with self._as_user(action, owner[0]), _asked_as_root(self._commands, action, *shown):
            _run_as_user(action, as_user, _child_ends_within_s(self._commands))

    def check(self, job_id: int, change: JobChange) -> None:
        """Refuse to go on where a user's process has not made a change that it was to make.

        Raises:
            NoSuchJobError: The job is gone.
            GatewayError: It has not.
        """
        found = read_job(self._commands, job_id)
        if found is None:
            raise NoSuchJobError(f"cannot change job {job_id}: it is gone")
        wanted = {
            "its time limit": (change.time_limit_s, found.time_limit_s),
            "its GPUs": (change.gpu_request, found.gpu_request),
        }
        if wrong := [name for name, (asked, is_now) in wanted.items() if asked is not None and asked != is_now]:
            raise GatewayError(
                f"cannot change job {job_id} as its user: {' and '.join(wrong)} did not change; a process of the "
                "user's has kept scontrol from it, or job_submit has"
            )

    @contextmanager
    def _as_user(self, action: str, uid: int) -> Iterator[None]:
        if self._clock() < self._again_s.get(uid, 0.0):
            raise SubmissionTimeoutError(
                f"cannot {action}: not tried, because an earlier process of uid {uid} did not end in time. Muri runs "
                f"none as this user for {_NONE_FOR_S / 60:g} minutes"
            )
        try:
            yield
        except SubmissionTimeoutError:
            self._again_s[uid] = self._clock() + _NONE_FOR_S
            raise
        except GatewayError as error:
            if is_limit_refusal(str(error)):
                self._at_limit()
            raise


def submit(commands: SlurmCommands, job: NewJob) -> int:
    """Submit a batch job as its user, tag it as root, and return its id.

    It is submitted held, its mark in its Comment, so that a job left behind by a crash can be recognized. sbatch cannot
    set an AdminComment, and a user may not. job_submit tags a job with --muri, and keeps it waiting.

    Raises:
        SlurmUnreachableError: slurmctld does not answer, or no process can be started.
        SubmissionTimeoutError: The user's process did not end in time.
        GatewayError: Slurm refused, or what the user's process says is not true.
    """
    check_new_job(job)
    mark = job.admin_comment or f"muri-submitted:{secrets.token_hex(8)}"
    begun_s = time.monotonic()
    job_id = _sbatch(commands, job, mark)
    _check_identity(commands, job_id, job, mark, begun_s)
    if job.muri:
        return job_id
    try:
        tag = [f"AdminComment={job.admin_comment}"] if job.admin_comment else []
        commands.run(f"tag job {job_id}", ["scontrol", "update", f"JobId={job_id}", *tag, "Comment="])
        with passing_over(job_started, job_ended):  # its user may have released it
            commands.run(f"release job {job_id}", ["scontrol", "release", str(job_id)])
    except GatewayError:
        with suppress(GatewayError):
            commands.run(f"cancel job {job_id}", ["scancel", str(job_id)])
        raise
    return job_id


def _sbatch(commands: SlurmCommands, job: NewJob, mark: str) -> int:
    """Run sbatch as the user and return the id that it prints, which may be a lie."""
    action = f"submit job {job.name!r}"
    user, sbatch = become(job.uid, job.gid, os.geteuid(), action), sbatch_arguments(job, mark)
    variables = job.environment or _LEAST_ENVIRONMENT
    listed = "".join(f"{name}={value}\0" for name, value in variables.items())
    commands.calls[SUBMISSION] += 1
    # Files in memory give sbatch its input, so nothing waits for it to read.
    with (
        _asked_as_root(commands, action, "show", "config"),
        _memory_file(encoded(job.script)) as stdin,
        _memory_file(encoded(listed)) as environment,
        _memory_file(encoded(_shell_exports(variables))) as exports,
    ):
        # Slurm 26.05 reads the file only together with ALL; neither version then adds the caller's variables.
        sbatch += ["--export=ALL"]
        arguments = [*user, *sbatch, f"--export-file={environment}"]
        try:
            output = _run_as_user(action, arguments, _child_ends_within_s(commands), stdin, (environment,))
        except _ChildError as error:
            if "--export-file" not in str(error):
                raise
            # Slurm 23.11 has no such option. The variables must not touch what still runs as root.
            program = shutil.which("sbatch", path=command_environment().get("PATH")) or "sbatch"
            become_job = ["env", "-i", "sh", "-c", f'. /dev/fd/{exports}; exec "$0" "$@"', program]
            arguments = [*user, *become_job, *sbatch[1:]]
            output = _run_as_user(action, arguments, _child_ends_within_s(commands), stdin, (exports,))
    match = _JOB_ID.match(output)
    if match is None:
        raise GatewayError(f"cannot {action}: sbatch printed {output[:80]!r} instead of a job id")
    return int(match[1])


def _shell_exports(variables: Mapping[str, str]) -> str:
    """Return lines for a shell that export a job's variables, but for those that sbatch itself would obey.

    `command` lets the shell go on where a variable is its own, such as UID in Bash.
    """
    conf = {name: value for name, value in command_environment().items() if name == "SLURM_CONF"}
    return "".join(
        f"command export {name}={shlex.quote(value)}\n"
        for name, value in {**variables, **conf}.items()
        if re.fullmatch(r"(?!SBATCH_|SLURM_CLUSTERS)[A-Za-z_]\w*", name, re.ASCII)
    )


def _check_identity(commands: SlurmCommands, job_id: int, new: NewJob, mark: str, begun_s: float) -> None:
    """Refuse a job that is not the one that was to be submitted.

    The mark proves nothing: the user's process has it among its arguments, and can write it into an older job.
    Releasing that one could lift an administrator's hold. The user's process was started at `begun_s` of this process's
    monotonic clock.
    """
    # slurmctld's time.
    now = _NOW.match(commands.run(f"look up job {job_id}", ["scontrol", "show", "config"]))
    found = read_job(commands, job_id)
    now_s = float(now[1]) if now else time.time()
    if found is None:
        raise NoSuchJobError(f"cannot submit job {new.name!r}: there is no job {job_id}, which sbatch named")
    if why := _difference(found, new, mark, now_s - (time.monotonic() - begun_s)):
        raise GatewayError(
            f"cannot submit job {new.name!r}: job {job_id}, which sbatch named, is another one (of {found.user}): "
            f"{why}; it is left alone. A process of uid {new.uid} has tampered with sbatch, or job_submit changes the "
            "job's name, comment or hold"
        )


def _difference(found: Job, new: NewJob, mark: str, begun_s: float) -> str:
    """Return why a job cannot be the one that was submitted just now, "" where it can."""
    # A site's job_submit may add to a comment.
    if found.uid != new.uid or found.name != new.name or mark not in found.comment:
        return "its user, name or comment differs"
    # Nothing holds a job with --muri where job_submit does not call muri.submit; root does not release it either.
    if not new.muri and (found.state is not JobState.PENDING or not found.held or found.reason != _HELD_BY_USER):
        return f"it is not held as sbatch holds it, but {found.state}, {found.reason or 'without a reason'}"
    # A site's job_submit may write an AdminComment of its own, and muri.submit writes the request of --muri there.
    tags = (STATE_PREFIX, PILOT_PREFIX, DRY_RUN_PREFIX) if new.muri else ("muri",)
    if found.array or found.het or found.restart_count or any(tag in found.admin_comment for tag in tags):
        return "it is part of an array or a heterogeneous job, has run before, or has a tag of Muri's"
    if found.submit_s < begun_s - _CLOCK_TOLERANCE_S:
        return "it is older"
    return ""


def become(uid: int, gid: int, own_uid: int, action: str) -> list[str]:
    """Return the words ahead of a command that let this process, of `own_uid`, run it as a job's user.

    Raises:
        GatewayError: It cannot become that user.
    """
    if own_uid == 0:
        return [
            "setpriv", f"--reuid={uid}", f"--regid={gid}", "--init-groups", "--inh-caps=-all",
            "--ambient-caps=-all", "--bounding-set=-all", "--no-new-privs", "--",
        ]  # fmt: skip
    if own_uid == uid:
        return []
    raise GatewayError(
        f"cannot {action}: it is uid {uid}'s, and this process is uid {own_uid}. Run the controller as root, which "
        "submits as each user; other users can only submit for themselves"
    )


class _ChildError(Exception):
    """The user's process failed, in its own words."""


class _ChildTimeoutError(_ChildError):
    """The user's process did not end in time."""


@contextmanager
def _asked_as_root(commands: SlurmCommands, action: str, *question: str) -> Iterator[None]:
    """Where a user's process fails, ask slurmctld as root first by scontrol: the user may have written the reason."""
    try:
        yield
    except _ChildError as error:
        commands.run(action, ["scontrol", *question])
        kind = SubmissionTimeoutError if isinstance(error, _ChildTimeoutError) else GatewayError
        raise kind(f"cannot {action}: {error}") from error


def _child_ends_within_s(commands: SlurmCommands) -> float:
    return min(_CHILD_ENDS_WITHIN_S, commands.timeout_s)


def _run_as_user(
    action: str,
    arguments: Sequence[str],
    timeout_s: float,
    stdin: int = subprocess.DEVNULL,
    files: Sequence[int] = (),
) -> str:
    """Run a command as a user and return its output. The user may stop, trace or change the process.

    Pipes take its output, which is no longer than they hold. Its session is its own, and ends with the time limit.
    """
    environment = command_environment()
    if arguments[0] == "setpriv":
        environment = {name: value for name, value in environment.items() if name not in _KEPT_FROM_USERS}
    try:
        with signals_kept_off():
            child = subprocess.Popen(
                [arguments[0], *map(encoded, arguments[1:])],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=files,
                cwd="/",
                env=environment,
                umask=0o022,
                start_new_session=True,
            )
    except OSError as err:
        raise not_started(action, arguments[0], err) from err
    try:
        return _output_of(child, timeout_s)
    finally:
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()


def _output_of(child: "subprocess.Popen[bytes]", timeout_s: float) -> str:
    try:
        code = child.wait(timeout_s)
    except subprocess.TimeoutExpired as err:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_KILLED_WITHIN_S)
        raise _ChildTimeoutError(f"it did not end within {timeout_s:g} s; the user may have stopped it") from err
    if code:
        raise _ChildError(first_line(_held_by(child.stderr)) or f"it ended with {code} and gave no reason")
    return _held_by(child.stdout)


def _held_by(pipe: IO[bytes] | None) -> str:
    """Return the content of a pipe, without waiting for more."""
    if pipe is None:
        return ""
    os.set_blocking(pipe.fileno(), False)
    try:
        return decoded(os.read(pipe.fileno(), _MOST_OUTPUT))
    except BlockingIOError:
        return ""


@contextmanager
def _memory_file(content: bytes) -> Iterator[int]:
    descriptor = os.memfd_create("sbatch", 0)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as stream:
            stream.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def sbatch_arguments(job: NewJob, mark: str) -> list[str]:
    """Return the sbatch command line that submits a job, held where it has no --muri, its script on standard input.

    Raises:
        GatewayError: A value could be taken for something else.
    """
    values: dict[str, str | int] = {
        "job-name": job.name,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "chdir": job.work_dir,
        "gres": text_fields.gres_argument(job.gpu_request) if job.gpu_request else "",
        "nodes": job.node_count,
        "ntasks": job.node_count * job.tasks_per_node,
        "ntasks-per-node": job.tasks_per_node if job.tasks_per_node > 1 else "",
        "cpus-per-task": job.cpu_count,
        "mem": f"{job.mem_per_node_mib}M" if job.mem_per_node_mib else "",
        "time": text_fields.time_limit_text(job.time_limit_s),
        "nodelist": job.required_nodes,
        "exclude": job.excluded_nodes,
        "constraint": job.features,
        "licenses": job.licenses,
        "reservation": job.reservation,
        "output": job.output,
        "input": "/dev/null",
        "comment": mark,
        "muri": job.muri,
    }
    values = {name: value for name, value in values.items() if value != ""}
    for name, value in values.items():
        text = str(value)
        if text.startswith("-") or any(character in text for character in "\0\n\r"):
            raise GatewayError(
                f"cannot submit job {job.name!r}: its --{name} is {text[:80]!r}, which sbatch could misread"
            )
    # sbatch obeys lines that begin with #PBS or #BSUB behind the command, too: a user's argument may hold one.
    requeue = "--requeue" if job.requeue else "--no-requeue"
    held = [] if job.muri else ["--hold"]
    shared = ["--oversubscribe"] if job.oversubscribe else []
    options = [f"--{name}={value}" for name, value in values.items()]
    return ["sbatch", "--parsable", "--ignore-pbs", *held, requeue, *shared, *options]
