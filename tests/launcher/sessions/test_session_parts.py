"""A member's question to its runtime, and how members get along on the same cores."""

import os
import threading

import pytest

from muri.launcher.protocol import AttachRequest, ProtocolError
from muri.launcher.sessions.setup import take_short_turns, wait_without_spinning


def _request() -> AttachRequest:
    return AttachRequest(
        job_id="101", target="train.py", module=False, arguments=("--lr", "1"), cwd="/", environment={}, umask=0o022,
        prefix="/p", python="3.8", executable="/p/python",
    )  # fmt: skip


def test_a_request_that_lacks_fields_is_refused() -> None:
    frame = _request().to_frame()
    few = {name: value for name, value in frame.items() if name not in {"options", "blocked", "ignored"}}
    assert AttachRequest.from_frame(few) == _request()
    with pytest.raises(ProtocolError, match=r"lacks fields: .*umask"):
        AttachRequest.from_frame({name: value for name, value in frame.items() if name != "umask"})


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
