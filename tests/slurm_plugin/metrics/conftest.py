"""A controller whose Slurm keeps accounts, in memory."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from stand_in_accounts import Accounts

from muri.slurm_plugin.controller import books


@pytest.fixture
def accounts(monkeypatch: pytest.MonkeyPatch) -> Accounts:
    """The accounts that the controllers of this test write to."""
    accounts = Accounts()
    monkeypatch.setattr(books, "Accounting", lambda: accounts)
    return accounts
