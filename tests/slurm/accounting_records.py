"""What Slurm's accounting says of jobs, for tests: who is billed for how many GPU seconds."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from sandbox.driver import Driver

_FIELDS = "JobIDRaw,User,Account,QOS,State,ElapsedRaw,AllocTRES,Start,End,NodeList,TimelimitRaw"
_GPUS = re.compile(r"(?:^|,)gres/gpu=(\d+)(?:,|$)")


class Payer(NamedTuple):
    """Whose limits and share a job counts against."""

    account: str
    qos: str


@dataclass(frozen=True)
class Record:
    """One run of a job as `sacct` tells it; a requeued job has a record for each of its runs.

    Attributes:
        complete: Whether it has ended and all of it is recorded. Slurm 22.05 calls the QOS of a short run "Unknown"
            for some seconds after its end.
    """

    job_id: int
    user: str
    payer: Payer
    state: str
    elapsed_s: int  # How long it has run so far, in whole seconds
    gpus: int  # How many GPUs it had; 0 before it starts
    start_s: int  # When it started, in seconds since the epoch; 0 before
    end_s: int  # When it ended, in seconds since the epoch; 0 before
    nodes: str  # Where it ran, in Slurm's notation
    limit_min: int  # Its time limit in minutes, 0 when it has none
    complete: bool

    @property
    def gpu_s(self) -> int:
        """Return the GPU seconds that this run is billed for."""
        return self.elapsed_s * self.gpus


def parse_records(text: str) -> list[Record]:
    """Read what `sacct --noheader --parsable2 --format=…` prints for the fields of this module."""
    return [_record(line) for line in text.splitlines() if line.strip()]


def _record(line: str) -> Record:
    job_id, user, account, qos, state, elapsed_s, tres, start_s, end_s, nodes, limit_min = line.split("|")
    gpus = _GPUS.search(tres)
    return Record(
        job_id=int(job_id), user=user, payer=Payer(account, qos), state=state.split()[0], elapsed_s=int(elapsed_s),
        gpus=int(gpus.group(1)) if gpus else 0, start_s=_number(start_s), end_s=_number(end_s), nodes=nodes,
        limit_min=_number(limit_min), complete="Unknown" not in (end_s, qos),
    )  # fmt: skip


def _number(text: str) -> int:
    """Read a time or a limit; "Unknown", "None" and "UNLIMITED" are 0."""
    return int(text) if text.isdigit() else 0


def records(driver: Driver, *jobs: int) -> list[Record]:
    """Return the records of these jobs, or of all jobs of the cluster: every run of each, steps not apart."""
    chosen = [f"--jobs={','.join(map(str, jobs))}"] if jobs else ["--starttime=1970-01-02"]
    done = driver.run(
        "sacct", "--allusers", "--allocations", "--duplicates", "--noheader", "--parsable2",
        f"--format={_FIELDS}", *chosen, user="root", env={"SLURM_TIME_FORMAT": "%s"},
    )  # fmt: skip
    return parse_records(done.stdout)


def complete_records(driver: Driver, *jobs: int) -> list[Record]:
    """Wait until each job has ended for good and all its runs are recorded, which may be seconds later."""
    for job in jobs:
        driver.wait_state(job)
    found: list[Record] = []

    def complete() -> bool:
        found[:] = records(driver, *jobs)
        return {record.job_id for record in found} == set(jobs) and all(record.complete for record in found)

    driver.wait_until(complete, f"the accounts of the jobs {jobs}")
    return found


def gpu_seconds(found: Iterable[Record]) -> Counter[Payer]:
    """Sum GPU seconds by account and QOS.

    For sums that stay, pass `complete_records`. `sreport` would say the same, but only for hours that are over. Each
    run is counted in whole seconds, so it may differ from the truth by a second for each of its GPUs.
    """
    sums: Counter[Payer] = Counter()
    for record in found:
        sums[record.payer] += record.gpu_s
    return sums


def most_gpus_at_once(found: Iterable[Record]) -> int:
    """Return how many GPUs these runs had together when they had most.

    A run that ends in the second in which another starts does not meet it. All must have ended.
    """
    changes = sorted(
        change for run in found for change in ((run.start_s, 1, run.gpus), (run.end_s, 0, -run.gpus)) if run.start_s
    )
    return max(accumulate((amount for _, _, amount in changes), initial=0))


def most_runs_at_once(found: Iterable[Record]) -> int:
    """Return how many of these runs there were when there were most."""
    return most_gpus_at_once(replace(run, gpus=1) for run in found)
