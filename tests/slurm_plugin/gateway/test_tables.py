"""Slurm's tables: islands from gres.conf, only believed where they fit; GPUs of running jobs; leases; reservations."""

import time
from collections.abc import Sequence

import pytest
from fake_slurm import FakeSlurm, make_node

from muri.slurm_plugin.gateway.base import GatewayError, NoGateLicenseError
from muri.slurm_plugin.gateway.tables import (
    GresConf,
    ReservationsReader,
    end_lease,
    extend_lease,
    gpus_by_node,
    gpus_taken,
    held_in,
    reservations_of_table,
)
from muri.slurm_plugin.records.cluster import Reservation

TWO = "Name=gpu File=/dev/nvidia0 Cores=0\nName=gpu File=/dev/nvidia1 Cores=1\n"


def islands(conf: GresConf, gpu_count: int = 2):
    return conf.with_islands((make_node("n1", gpu_count=gpu_count),))[0].gpu_islands


def test_islands_come_from_the_file_and_what_it_includes(tmp_path):
    (tmp_path / "gres.conf").write_text("Include more.conf\n")
    (tmp_path / "more.conf").write_text(TWO)
    conf = GresConf(tmp_path / "gres.conf")
    assert islands(conf) == ((0,), (1,))
    assert islands(conf, gpu_count=4) == ()  # Slurm has others
    (tmp_path / "more.conf").write_text(TWO.replace("Cores=1", "Cores=0"))
    assert islands(conf) == ()


def test_without_the_file_nothing_is_known(tmp_path):
    conf = GresConf(tmp_path / "gres.conf")
    assert islands(conf) == ()
    (tmp_path / "gres.conf").write_text(TWO)
    assert islands(conf) == ((0,), (1,))
    (tmp_path / "gres.conf").unlink()
    assert islands(conf) == ()
    assert islands(GresConf(None)) == ()


START = "JobId=7 JobName=wrap JobState={state} Reason=None NodeList={nodes} JOB_GRES=gpu:1 "
SHARE = "Nodes={nodes} CPU_IDs=0-1 Mem=2000 GRES={gres} MinCPUsNode=1"
JOBS = "\n".join(
    (START + SHARE).format(state=state, nodes=nodes, gres=gres)
    for state, nodes, gres in (
        ("RUNNING", "n1", "gpu:1(IDX:0)"),
        ("SUSPENDED", "n[1-2]", "gpu:a100:1(IDX:3),muri:1"),
        ("COMPLETED", "n1", "gpu:1(IDX:1)"),
        ("RUNNING", "n3", ""),
    )
)
PAIRS = "".join(
    f"Name=gpu File=/dev/nvidia{one} Links={links}\n"
    for one, links in enumerate(("-1,1,0,0", "1,-1,0,0", "0,0,-1,1", "0,0,1,-1"))
)


def test_running_jobs_tell_which_gpus_they_have():
    assert gpus_by_node(held_in(JOBS), 6) == {"n1": (0, 3), "n2": (3,)}


def test_shares_of_more_gpus_than_there_are_take_no_time_to_read():
    """Each of these lists would take a tenth of a second to unfold; a submit line has room for ten thousand."""
    pretended = START.format(state="RUNNING", nodes="n1") + "".join(
        " " + SHARE.format(nodes=f"n[1-{65_536 - number}]", gres="gpu:1(IDX:1)") for number in range(9_000)
    )
    begun_s = time.process_time()
    assert gpus_by_node(held_in(f"{pretended}\n{JOBS}"), 6) == {"n1": (0, 3), "n2": (3,)}
    assert time.process_time() - begun_s < 30.0


@pytest.mark.parametrize("pretended", [["n1[-999999]"], ["n[9999-1]", "n[1-9]"]])
def test_no_share_of_more_gpus_than_there_are_is_unfolded(pretended):
    assert gpus_by_node([(nodes, (1,)) for nodes in pretended], 6) == {}


class Telling(FakeSlurm):
    """Slurm of which a test says what GPUs are in use."""

    asked = 0
    fails = False

    def gpus_in_use(self):
        self.asked += 1
        if self.fails:
            raise GatewayError("no")
        return (("n1", (0,)), ("n[1-2]", (2,)), ("n[", (1,)))


def test_slurm_is_asked_only_where_it_matters_which_gpus_are_free(tmp_path):
    (tmp_path / "gres.conf").write_text(PAIRS)
    conf, slurm = GresConf(tmp_path / "gres.conf"), Telling([], [])
    idle = make_node("n2", gpu_count=4)
    told = make_node("n3", gpu_count=4, gpus_allocated=1, gpus_in_use=(3,))
    unlike = make_node("n4", gpu_count=2, gpus_allocated=1)
    assert conf.with_places(slurm, (idle, told, unlike)) == conf.with_islands((idle, told, unlike))
    assert slurm.asked == 0
    shared = make_node("n1", gpu_count=4, gpus_allocated=2)
    found = conf.with_places(slurm, (shared, idle))
    assert [node.gpus_in_use for node in found] == [(0, 2), ()]
    assert {node.gpu_islands for node in found} == {((0, 1), (2, 3))}
    slurm.fails = True
    assert conf.with_places(slurm, (shared,)) == conf.with_islands((shared,))
    assert slurm.asked == 2


@pytest.mark.parametrize(
    ("gres_used", "taken"),
    [
        ("gpu:tesla:1(IDX:1),muri:3,shard:tesla:2(2/4,-/4)", 2),
        ("gpu:0(IDX:N/A),shard:0(0/4,0/4)", 0),
        ("gpu:0(IDX:N/A),mps:a100:50(0/100,50/100,10/100)", 2),
        ("gpu:a100:2(IDX:0,3),muri:1", 2),
        ("", 0),
    ],
)
def test_a_gpu_that_a_job_has_a_share_of_is_taken(gres_used: str, taken: int) -> None:
    assert gpus_taken(gres_used) == taken


INVALID = GatewayError("cannot x: Requested reservation is invalid")


class Scontrol:
    """Commands with an answer for each verb, "" for others; an error is raised."""

    def __init__(self, **answers: str | GatewayError) -> None:
        self.answers = answers
        self.calls: list[list[str]] = []

    def run(self, _action: str, arguments: Sequence[str]) -> str:
        self.calls.append(list(arguments))
        answer = self.answers.get(arguments[1], "")
        if isinstance(answer, GatewayError):
            raise answer
        return answer


@pytest.mark.parametrize(("end_s", "for_s"), [(1600.0, 600), (0.0, 1)])
def test_lease_is_made_where_there_is_none(monkeypatch: pytest.MonkeyPatch, end_s: float, for_s: int) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    commands = Scontrol(update=INVALID, show="LicenseName=muri_gate Total=500 Used=0")
    extend_lease(commands, end_s)  # type: ignore[arg-type]
    assert commands.calls[0] == ["scontrol", "update", "reservationname=muri_gate", f"endtime=now+{for_s}"]
    assert commands.calls[-1] == [
        "scontrol", "create", "reservation", "reservationname=muri_gate", "flags=LICENSE_ONLY",
        "licenses=muri_gate:500", "user=root", "starttime=now", f"endtime=now+{for_s}",
    ]  # fmt: skip


@pytest.mark.parametrize("said", ["", GatewayError('query "muri_gate" matched zero licenses.')])
def test_a_slurm_without_the_license_is_told_from_one_that_refuses(said: str | GatewayError) -> None:
    with pytest.raises(NoGateLicenseError, match=r"slurm\.conf"):
        extend_lease(Scontrol(update=INVALID, show=said), 0.0)  # type: ignore[arg-type]


def test_lease_that_is_not_there_ends_without_an_error() -> None:
    end_lease(Scontrol(delete=INVALID))  # type: ignore[arg-type]


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
