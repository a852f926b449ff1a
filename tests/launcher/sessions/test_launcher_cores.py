"""How members' threads get along on the same cores."""

import os
import threading

import pytest

from muri.launcher.sessions.setup import take_short_turns, wait_without_spinning


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({"GOMP_SPINCOUNT": "9"}, {"GOMP_SPINCOUNT": "9"}), ({"A": "b"}, {"A": "b", "OMP_WAIT_POLICY": "passive"})],
)
def test_openmp_does_not_spin_unless_told_to(environment: dict[str, str], expected: dict[str, str]) -> None:
    wait_without_spinning(environment)
    assert environment == expected


def test_short_turns_leave_policy_and_nice_as_they_are() -> None:
    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, 3)
        take_short_turns()
        found.append((os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)))

    found: list[tuple[int, int]] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(os.SCHED_OTHER, 3)]
