"""Slurm's accounting: what `sacct` tells of jobs, and words that `sacctmgr` writes into ended jobs' records."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from muri.slurm_plugin.gateway.base import GatewayError, GatewayUnavailableError, NoSuchJobError
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.records.usage import Run

_FIELDS: Final = (
    "JobIDRaw", "JobID", "User", "Account", "QOS", "State", "Submit", "Start", "End", "ElapsedRaw", "AllocTRES",
    "AdminComment",
)  # fmt: skip

_BETWEEN: Final = "\x1f"
"""Between fields, because a bar may stand in a comment."""

_GPUS: Final = re.compile(r"(?:^|,)gres/gpu=(\d+)(?:,|$)")

_NO_DATABASE: Final = ("accounting storage is disabled", "not running a supported accounting_storage plugin")

_TIMEOUT_S: Final = 15.0

_NO_RECORD: Final = ("didn't affect anything", "Data has not changed")
"""What sacctmgr says where it finds nothing to change; which of the two comes first depends on Slurm's release."""

_JOBS_AT_ONCE: Final = 500


class NoAccountingError(GatewayError):
    """Slurm keeps no accounts here."""


class Accounting:
    """Reads and completes the records that slurmdbd keeps.

    Args:
        commands: How commands are run.
    """

    def __init__(self, commands: SlurmCommands | None = None) -> None:
        self._commands = commands or SlurmCommands(_TIMEOUT_S)

    def runs_of(self, jobs: Iterable[int | str]) -> list[Run]:
        """Return every run of some jobs, in one call for some hundred of them.

        Args:
            jobs: Their ids, or "12_3" for a job array's task; an array's id means all its tasks.

        Raises:
            NoAccountingError: There are no accounts.
            GatewayError: sacct failed.
        """
        ids = sorted(set(map(str, jobs)))
        chunks = (ids[start : start + _JOBS_AT_ONCE] for start in range(0, len(ids), _JOBS_AT_ONCE))
        return [run for chunk in chunks for run in self._read([f"--jobs={','.join(chunk)}"])]

    def runs_between(self, since: str, until: str, filters: Sequence[str] = ()) -> list[Run]:
        """Return every run of the jobs that waited or ran between two times; which jobs is up to who asks.

        Args:
            since: As sacct takes it, such as "2026-11-01".
            until: The same.
            filters: More options for sacct, such as "--user=alice".

        Raises:
            NoAccountingError: There are no accounts.
            GatewayError: sacct failed.
        """
        return self._read([f"--starttime={since}", f"--endtime={until}", *filters])

    def _read(self, chosen: Sequence[str]) -> list[Run]:
        options = ("--allocations", "--duplicates", "--noheader", "--parsable2", f"--delimiter={_BETWEEN}")
        try:
            text = self._commands.run(
                "read the accounts", ["sacct", *options, f"--format={','.join(_FIELDS)}", *chosen]
            )
        except GatewayError as error:
            raise _explained(error) from error
        return parse_runs(text)

    def set_admin_comment(self, job_id: int, comment: str, name: str = "") -> None:
        """Replace the AdminComment in an ended job's record; slurmctld itself refuses that once a job has ended.

        Args:
            job_id: The job.
            comment: Its AdminComment from now on.
            name: What commands call it, such as "12_3": an array's own id means all its tasks.

        Raises:
            NoAccountingError: There are no accounts.
            NoSuchJobError: They have no such job.
            GatewayError: sacctmgr failed.
        """
        change = ["modify", "job", "where", f"jobid={name or job_id}", "set", f"AdminComment={comment}"]
        try:
            self._commands.run(f"complete the record of job {job_id}", ["sacctmgr", "--immediate", *change])
        except GatewayError as error:
            if any(words in str(error) for words in _NO_RECORD):
                raise NoSuchJobError(
                    f"{error}: the accounts do not have job {job_id} yet, or have these words"
                ) from error
            raise _explained(error) from error


def _explained(error: GatewayError) -> GatewayError:
    """The same error, or that there are no accounts."""
    if any(words in str(error).lower() for words in _NO_DATABASE):
        return NoAccountingError(
            f"{error}. Slurm keeps no accounts here (AccountingStorageType in slurm.conf): reports need slurmdbd"
        )
    if isinstance(error, GatewayUnavailableError):
        return NoAccountingError(str(error))
    return error


def parse_runs(text: str) -> list[Run]:
    """Read what sacct printed; a line with other fields, such as half of a comment with a line break, is left out."""
    lines = (line.split(_BETWEEN) for line in text.split("\n"))
    return [_run(fields) for fields in lines if len(fields) == len(_FIELDS) and fields[0].isdigit()]


def _run(fields: Sequence[str]) -> Run:
    job_id, name, user, account, qos, state, submit_s, start_s, end_s, elapsed_s, tres, comment = fields
    gpus = _GPUS.search(tres)
    return Run(
        job_id=int(job_id), user=user, account=account, qos=qos, state=state.partition(" ")[0],
        submit_s=_time(submit_s), start_s=_time(start_s), end_s=_time(end_s), elapsed_s=_time(elapsed_s),
        gpu_count=int(gpus[1]) if gpus else 0, admin_comment=_with_quotes(comment),
        task=name if "_" in name else "",
    )  # fmt: skip


def _time(text: str) -> int:
    """Read a time; "Unknown" and "None" are 0."""
    return int(text) if text.isdigit() else 0


def _with_quotes(comment: str) -> str:
    """Undo what sacctmgr does to quotes in Muri's own words."""
    words = comment.split(" ")
    return " ".join(word.replace("`", '"') if word.startswith("muri") and '"' not in word else word for word in words)
