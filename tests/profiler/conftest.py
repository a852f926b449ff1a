"""A store of each test's own; and properties hold on slow machines, too."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from profile_commands import use_own_store

# No example is refused for the time that it takes.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_own_store(tmp_path, monkeypatch)
