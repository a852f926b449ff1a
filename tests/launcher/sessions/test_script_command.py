"""Which command starts a member's script, and how members' threads get along on the same cores."""

import os
import threading
from typing import Any

import pytest
from polling import DEADLINE_S

from muri.launcher.arbitration.disciplines import FairArbiter
from muri.launcher.protocol import AttachRequest, ProtocolError
from muri.launcher.sessions.process_session import ProcessSession, script_command
from muri.launcher.sessions.setup import take_short_turns, wait_without_spinning

RANK = {"RANK": "0", "WORLD_SIZE": "2"}


def _request(**environment: str) -> AttachRequest:
    return AttachRequest(
        job_id="101", target="train.py", module=False, arguments=("--lr", "1"), cwd="/", environment=environment,
        umask=0o022, prefix="/p", python="3.8", executable="/p/python",
    )  # fmt: skip


@pytest.mark.parametrize("environment", [{}, RANK, {"MURI_AUTOMATIC": "0", **RANK}])
def test_muris_runner_starts_scripts_with_stages_and_ranks(environment: dict[str, str]) -> None:
    command = script_command(_request(**environment))
    assert command == ["/p/python", "-m", "muri.launcher.script.solo", "train.py", "--lr", "1"]


def test_a_script_that_wants_no_stages_is_plain() -> None:
    assert script_command(_request(MURI_AUTOMATIC="0")) == ["/p/python", "train.py", "--lr", "1"]


def test_a_request_of_an_older_member_has_no_limits_and_one_that_lacks_fields_is_refused() -> None:
    frame = _request().to_frame()
    older = {name: value for name, value in frame.items() if name not in {"limits", "nice", "blocked", "ignored"}}
    assert AttachRequest.from_frame(older) == _request()
    with pytest.raises(ProtocolError, match=r"lacks fields: .*umask"):
        AttachRequest.from_frame({name: value for name, value in frame.items() if name != "umask"})


@pytest.mark.parametrize("limits", [None, 5, {"RLIMIT_NOFILE": 5}, {"RLIMIT_NOFILE": ["a", "b"]}])
def test_limits_that_are_not_to_be_understood_are_refused(limits: object) -> None:
    with pytest.raises(ProtocolError, match="malformed limits"):
        AttachRequest.from_frame(_request().to_frame() | {"limits": limits})


def test_a_member_for_whom_no_thread_is_left_goes_back_to_the_queue() -> None:
    def start(_member: str) -> Any:
        raise RuntimeError("can't start new thread")

    ended, files = threading.Event(), tuple(os.open(os.devnull, os.O_RDWR) for _ in range(3))
    session = ProcessSession(_request(), files, FairArbiter(), -1, start)
    session.start(lambda _: ended.set())
    assert ended.wait(DEADLINE_S)
    assert session.lost


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
