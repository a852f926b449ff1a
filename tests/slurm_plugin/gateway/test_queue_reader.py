"""Reading a queue of which squeue prints too much; leases; reservations."""

from collections.abc import Callable, Sequence

import pytest
from fake_slurm import make_job, make_node
from recorded_slurm import RecordedCommands, row

from muri.slurm_plugin.gateway.base import (
    CommandTimeoutError,
    GatewayError,
    NoGateLicenseError,
    SlurmUnreachableError,
    TooLongAnswerError,
    kind_of,
)
from muri.slurm_plugin.gateway.commands import CommandGateway
from muri.slurm_plugin.gateway.queue_reader import ArrayRecords, DetailsReader, QueueReader
from muri.slurm_plugin.gateway.squeue import known_fields
from muri.slurm_plugin.gateway.tables import ReservationsReader, end_lease, extend_lease, reservations_of_table
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


class FailingCommands(RecordedCommands):
    """Of a queue of 100 jobs, some of which make squeue fail."""

    def __init__(self, broken: set[int], error: GatewayError) -> None:
        super().__init__("26.05.5")
        self.rows = [row("26.05.5", "bare") | {"JobID": str(number)} for number in range(1, 101)]
        self.broken, self.error = broken, error

    def output(self, action: str, arguments: Sequence[str], variables: dict[str, str] | None = None) -> bytearray:
        chosen = [word.removeprefix("--jobs=").split(",") for word in arguments if word.startswith("--jobs=")]
        if not chosen or self.broken.intersection(map(int, chosen[0])):
            self.asked.append(list(arguments))
            raise self.error
        return super().output(action, arguments, variables)


def reader(commands: FailingCommands) -> QueueReader:
    return QueueReader(commands, known_fields(""), DetailsReader(lambda _: b""))  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [TooLongAnswerError("too long"), CommandTimeoutError("too slow")])
def test_jobs_with_too_much_text_cost_themselves(error: GatewayError) -> None:
    commands = FailingCommands({7, 60}, error)
    jobs, unreadable = reader(commands).read(0.0)
    assert [(each.job_id, each.why) for each in unreadable] == [(7, str(error)), (60, str(error))]
    assert len(jobs) == 98
    assert len(commands.asked) < 40


def test_slurmctld_that_does_not_answer_is_asked_once() -> None:
    commands = FailingCommands({7}, SlurmUnreachableError("no answer"))
    with pytest.raises(SlurmUnreachableError, match="no answer"):
        reader(commands).read(0.0)
    assert len(commands.asked) == 1


def test_reading_in_parts_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muri.slurm_plugin.gateway.queue_reader._PARTS_WITHIN_S", -1.0)
    with pytest.raises(SlurmUnreachableError, match="in parts"):
        reader(FailingCommands({7}, CommandTimeoutError("too slow"))).read(0.0)


def test_a_squeue_that_is_too_slow_for_every_job_is_no_empty_queue() -> None:
    with pytest.raises(CommandTimeoutError):
        reader(FailingCommands(set(range(1, 101)), CommandTimeoutError("too slow"))).read(0.0)


@pytest.mark.parametrize(("field", "shown_id"), [("UserID", 4), ("JobID", 0)])
def test_a_broken_record_costs_itself(field: str, shown_id: int) -> None:
    commands = RecordedCommands("26.05.5")
    intact = {job.job_id for job in CommandGateway(commands).snapshot().jobs}  # type: ignore[arg-type]
    next(row for row in commands.rows if row["JobID"] == "4")[field] = "x"
    found = CommandGateway(commands).snapshot()  # type: ignore[arg-type]
    assert {job.job_id for job in found.jobs} == intact - {4}
    assert [each.job_id for each in found.unreadable] == [shown_id]


def test_a_tagged_job_of_which_not_all_is_told_is_left_alone() -> None:
    commands = RecordedCommands("26.05.5")
    commands.rows[5]["admin_comment"] = "muri:model=m"
    job_id = int(commands.rows[5]["JobID"])
    assert CommandGateway(commands).snapshot().unreadable == ()  # type: ignore[arg-type]
    del commands.shown[job_id]
    found = CommandGateway(commands).snapshot()  # type: ignore[arg-type]
    assert [each.job_id for each in found.unreadable] == [job_id]


def test_one_job_is_read_alone() -> None:
    commands = RecordedCommands("26.05.5")
    commands.rows[5]["admin_comment"] = "muri:model=m"
    gateway = CommandGateway(commands)  # type: ignore[arg-type]
    wanted = next(job for job in gateway.queue().jobs if job.admin_comment)
    commands.asked.clear()
    assert gateway.one_job(wanted.job_id).jobs == (wanted,)
    assert [kind_of(arguments) for arguments in commands.asked] == ["job", "job"]


@pytest.mark.parametrize(("end_s", "for_s"), [(1600.0, 600), (0.0, 1)])
def test_lease_is_made_where_there_is_none(monkeypatch: pytest.MonkeyPatch, end_s: float, for_s: int) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)

    def answer(arguments: list[str]) -> str:
        if arguments[1] == "update":
            raise GatewayError(INVALID)
        return "LicenseName=muri_gate Total=500 Used=0" if arguments[1] == "show" else ""

    commands = StandIn(answer)
    extend_lease(commands, end_s)  # type: ignore[arg-type]
    assert commands.calls[0] == ["scontrol", "update", "reservationname=muri_gate", f"endtime=now+{for_s}"]
    assert commands.calls[-1] == [
        "scontrol", "create", "reservation", "reservationname=muri_gate", "flags=LICENSE_ONLY",
        "licenses=muri_gate:500", "user=root", "starttime=now", f"endtime=now+{for_s}",
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


RESERVATIONS = "ReservationName=m StartTime=100 EndTime=200 Nodes=n1 Flags=MAINT Licenses=(null)\n"


class Table:
    """Slurm's reservations, and how often they were asked for."""

    def __init__(self) -> None:
        self.text = RESERVATIONS
        self.count = 0

    def __call__(self) -> str:
        self.count += 1
        return self.text


def test_reservations_are_read_some_minutes_apart() -> None:
    now_s, table = [0.0], Table()
    reservations = ReservationsReader(table, lambda: now_s[0])
    for now_s[0] in (0.0, 299.0, 300.0):
        assert [each.name for each in reservations.read([make_node("n1")])] == ["m"]
    assert table.count == 2


def test_a_reservation_that_begins_or_ends_and_muris_own_are_seen_at_once() -> None:
    table = Table()
    reservations = ReservationsReader(table, lambda: 0.0)
    reservations.read([make_node("n1")])
    reservations.read([make_node("n1", state="IDLE+MAINT")])
    reservations.read([make_node("n1", state="MIXED+MAINT")])
    assert table.count == 2
    table.text = ""
    assert reservations.read([make_node("n1")]) == ()
    reservations.forget()
    reservations.read([make_node("n1")])
    assert table.count == 4


@pytest.mark.parametrize(
    ("job_id", "name", "files"), [(7, "7", 7), (12, "12_[4-9]", 12), (13, "13", 12), (20, "20_3", 20), (99, "99", 99)]
)
def test_only_a_record_with_its_arrays_id_needs_a_name(job_id: int, name: str, files: int) -> None:
    arrays = ArrayRecords()
    arrays.learn(
        [
            make_job(7),
            make_job(12, array=True, array_job_id=12, array_tasks="4-9"),
            make_job(13, array=True, array_job_id=12, array_tasks="3"),
            make_job(20, array=True, array_job_id=20, array_tasks="3"),
        ]
    )
    assert (arrays.name(job_id), arrays.files_of(job_id)) == (name, files)
