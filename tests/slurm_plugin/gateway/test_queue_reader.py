"""Reading a queue of which squeue's output is broken as a whole; leases; reservations."""

import json
from collections.abc import Callable, Sequence

import pytest

from muri.slurm_plugin.gateway.base import (
    CommandTimeoutError,
    GatewayError,
    NoGateLicenseError,
    SlurmUnreachableError,
    TooLongAnswerError,
)
from muri.slurm_plugin.gateway.lease import end_lease, extend_lease
from muri.slurm_plugin.gateway.queue_reader import QueueReader
from muri.slurm_plugin.gateway.reservation_table import reservations_of_table
from muri.slurm_plugin.records.cluster import Reservation

INVALID = "cannot x: Requested reservation is invalid"


class StandIn:
    """Answers commands by a function."""

    timeout_s = 1.0

    def __init__(self, answer: Callable[[list[str]], str]) -> None:
        self.answer = answer
        self.calls: list[list[str]] = []

    def run(self, _action: str, arguments: Sequence[str]) -> str:
        self.calls.append(list(arguments))
        return self.answer(list(arguments))

    def output(self, action: str, arguments: Sequence[str]) -> bytearray:
        return bytearray(self.run(action, arguments).encode())


def reader(broken: set[int], *, chooses: bool = True, error: GatewayError | None = None) -> QueueReader:
    everyone = list(range(1, 101))

    def answer(arguments: list[str]) -> str:
        if "--noheader" in arguments:
            return "\n".join(map(str, everyone))
        chosen = [argument for argument in arguments if argument.startswith("--jobs=")] if chooses else []
        ids = [int(word) for word in chosen[0].removeprefix("--jobs=").split(",")] if chosen else everyone
        records = [{"job_id": job_id, "user_id": 1, "group_id": 1} for job_id in ids]
        if error is not None and broken.intersection(ids):
            raise error
        return json.dumps({"jobs": records}) + ("}" if broken.intersection(ids) else "")

    return QueueReader(StandIn(answer), ["squeue", "--json"])  # type: ignore[arg-type]


def calls(queue: QueueReader) -> list[list[str]]:
    """Commands that a reader has run."""
    assert isinstance(queue.commands, StandIn)
    return queue.commands.calls


def test_jobs_that_break_the_whole_output_cost_themselves() -> None:
    queue = reader({7, 60})
    found = queue.read(0.0)
    assert [each.job_id for each in found.unreadable] == [7, 60]
    assert len(found.jobs) == 98
    assert len(calls(queue)) < 40


@pytest.mark.parametrize("error", [TooLongAnswerError("too long"), CommandTimeoutError("too slow")])
def test_jobs_with_too_much_text_cost_themselves(error: GatewayError) -> None:
    found = reader({7, 60}, error=error).read(0.0)
    assert [(each.job_id, each.why) for each in found.unreadable] == [(7, str(error)), (60, str(error))]
    assert len(found.jobs) == 98


def test_slurmctld_that_does_not_answer_is_asked_once() -> None:
    queue = reader({7}, error=SlurmUnreachableError("no answer"))
    with pytest.raises(SlurmUnreachableError, match="no answer"):
        queue.read(0.0)
    assert len(calls(queue)) == 1


def test_reading_in_parts_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muri.slurm_plugin.gateway.queue_reader._PARTS_WITHIN_S", -1.0)
    with pytest.raises(SlurmUnreachableError, match="in parts"):
        reader({7}, error=CommandTimeoutError("too slow")).read(0.0)


def test_output_that_is_broken_whatever_is_asked_for_is_no_empty_queue() -> None:
    with pytest.raises(GatewayError, match="did not print JSON"):
        reader({7}, chooses=False).read(0.0)


def test_lease_is_made_where_there_is_none() -> None:
    def answer(arguments: list[str]) -> str:
        if arguments[1] == "update":
            raise GatewayError(INVALID)
        return "LicenseName=muri_gate Total=500 Used=0" if arguments[1] == "show" else ""

    commands = StandIn(answer)
    extend_lease(commands, 0.0)  # type: ignore[arg-type]
    assert commands.calls[0] == ["scontrol", "update", "reservationname=muri_gate", "endtime=now+1"]
    assert commands.calls[-1] == [
        "scontrol", "create", "reservation", "reservationname=muri_gate", "flags=LICENSE_ONLY",
        "licenses=muri_gate:500", "user=root", "starttime=now", "endtime=now+1",
    ]  # fmt: skip


@pytest.mark.parametrize("said", ["", GatewayError('query "muri_gate" matched zero licenses.')])
def test_a_slurm_without_the_licence_is_told_from_one_that_refuses(said: str | GatewayError) -> None:
    def answer(arguments: list[str]) -> str:
        if arguments[1] == "update":
            raise GatewayError(INVALID)
        if isinstance(said, GatewayError):
            raise said
        return said

    with pytest.raises(NoGateLicenseError, match=r"slurm\.conf"):
        extend_lease(StandIn(answer), 0.0)  # type: ignore[arg-type]


def test_lease_that_is_not_there_ends_without_an_error() -> None:
    def answer(_arguments: list[str]) -> str:
        raise GatewayError(INVALID)

    end_lease(StandIn(answer))  # type: ignore[arg-type]


def test_reservations_are_read_and_a_broken_line_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    table = (
        "ReservationName=m StartTime=100 EndTime=200 Nodes=n[3-4] Flags=MAINT,PURGE_COMP=00:05:00 Licenses=(null)\n"
        "ReservationName=broken StartTime=x EndTime=200\n"
        "ReservationName=a StartTime=2026-01-01T00:00:00 EndTime=300 Nodes=(null) Licenses=m:1;g:2\nNo reservations\n"
    )
    first, second = reservations_of_table(table)
    assert (first.name, first.nodes, first.end_s, first.licenses) == ("a", "", 300.0, "m:1,g:2")
    assert second == Reservation("m", "n[3-4]", 100.0, 200.0, ("MAINT", "PURGE_COMP"), "")
    assert "ReservationName=broken" in caplog.text
