"""A store of each test's own."""

from pathlib import Path

import pytest
from profile_commands import use_own_store


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_own_store(tmp_path, monkeypatch)
