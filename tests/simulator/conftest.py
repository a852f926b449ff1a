"""Conservation of jobs and GPU-seconds is checked at every step of every simulation in these tests."""

import pytest
from hypothesis.internal.conjecture import providers

from muri.simulator.engine.checks import SWITCH


@pytest.fixture(autouse=True)
def conservation_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in processes that a test starts."""
    monkeypatch.setenv(SWITCH, "1")


# As in tests/policies/conftest.py: examples do not depend on what was imported before.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants
