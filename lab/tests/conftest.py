"""Conservation of jobs and GPU-seconds is checked at every step of every simulation in these tests."""

import pytest

from muri.simulator.engine.checks import SWITCH


@pytest.fixture(autouse=True)
def conservation_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in processes that a test starts."""
    monkeypatch.setenv(SWITCH, "1")
