"""What Slurm's accounting says of jobs, for tests: who is billed for how many GPU seconds."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from sandbox.driver import Driver

_FIELDS = "JobIDRaw,User,Account,QOS,State,ElapsedRaw,AllocTRES,End"
_GPUS = re.compile(r"(?:^|,)gres/gpu=(\d+)(?:,|$)")


class Payer(NamedTuple):
    """Whose limits and share a job counts against."""

    account: str
    qos: str


@dataclass(frozen=True)
class Record:
    """One run of a job as `sacct` tells it; a requeued job has a record for each of its runs.

    Attributes:
        elapsed_s: How long it has run so far, in whole seconds.
        gpus: How many GPUs it had; 0 before it starts.
        complete: Whether it has ended and all of it is recorded. Slurm 22.05 calls the QOS of a short run "Unknown"
            for some seconds after its end.
    """

    job_id: int
    user: str
    payer: Payer
    state: str
    elapsed_s: int
    gpus: int
    complete: bool

    @property
    def gpu_s(self) -> int:
        """Return the GPU seconds that this run is billed for."""
        return self.elapsed_s * self.gpus


def parse_records(text: str) -> list[Record]:
    """Read what `sacct --noheader --parsable2 --format=…` prints for the fields of this module."""
    return [_record(line) for line in text.splitlines() if line.strip()]


def _record(line: str) -> Record:
    job_id, user, account, qos, state, elapsed_s, tres, end = line.split("|")
    gpus = _GPUS.search(tres)
    return Record(
        job_id=int(job_id), user=user, payer=Payer(account, qos), state=state.split()[0], elapsed_s=int(elapsed_s),
        gpus=int(gpus.group(1)) if gpus else 0, complete="Unknown" not in (end, qos),
    )  # fmt: skip


def records(driver: Driver, *jobs: int) -> list[Record]:
    """Return the records of these jobs, or of all jobs of the cluster: every run of each, steps not apart."""
    chosen = [f"--jobs={','.join(map(str, jobs))}"] if jobs else ["--starttime=1970-01-02"]
    done = driver.run(
        "sacct", "--allusers", "--allocations", "--duplicates", "--noheader", "--parsable2",
        f"--format={_FIELDS}", *chosen, user="root",
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
