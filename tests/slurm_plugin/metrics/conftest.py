"""A controller whose Slurm keeps accounts, in memory."""

from collections.abc import Iterable

import pytest

from muri.slurm_plugin.controller import books
from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.records.usage import Run


class Accounts:
    """Stands in for `Accounting`.

    Attributes:
        runs: What sacct would tell.
        comments: AdminComments written so far, by job id.
        failure: Raised by each call, if set.
        writes: How often an AdminComment was to be written.
    """

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.comments: dict[int, str] = {}
        self.failure: GatewayError | None = None
        self.writes = 0

    def runs_of(self, job_ids: Iterable[int]) -> list[Run]:
        if self.failure is not None:
            raise self.failure
        wanted = set(job_ids)
        return [run for run in self.runs if run.job_id in wanted]

    def set_admin_comment(self, job_id: int, comment: str, name: str = "") -> None:
        self.writes += 1
        if self.failure is not None:
            raise self.failure
        self.comments[job_id] = comment


@pytest.fixture
def accounts(monkeypatch: pytest.MonkeyPatch) -> Accounts:
    """The accounts that the controllers of this test write to."""
    accounts = Accounts()
    monkeypatch.setattr(books, "Accounting", lambda: accounts)
    return accounts
