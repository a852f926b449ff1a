"""The parts of the pyslurm gateway that need no Slurm: versions, translation, libslurm's node table."""

import logging
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_slurm import FakeSlurm

from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller import assemble as open_gateway
from muri.slurm_plugin.gateway import pyslurm_api, pyslurm_records
from muri.slurm_plugin.gateway.base import GatewayError, GatewayUnavailableError
from muri.slurm_plugin.gateway.commands import CommandGateway
from muri.slurm_plugin.gateway.pyslurm_api import NoPyslurmError, check_controller, check_library, import_pyslurm
from muri.slurm_plugin.gateway.tables import nodes_of_table
from muri.slurm_plugin.records.cluster import JobChange

TABLE = """\
Node data as of 2026-01-01T00:00:00, record count 2
NodeName=n2 Arch=x86_64 CoresPerSocket=1  CPUAlloc=3 CPUEfctv=14 CPUTot=16 CPULoad=0.27 Gres=gpu:a100:2 \
GresDrain=N/A GresUsed=gpu:a100:1(IDX:0) OS=Linux 6.1 #1 SMP  RealMemory=65000 AllocMem=8000 FreeMem=22868 \
State=ALLOCATED+DRAIN ThreadsPerCore=2 MemSpecLimit=1000 \
CfgTRES=cpu=16 Reason=State=IDLE CPUTot=99 [root@2026-01-01T00:00:00]
NodeName=n1 CPUAlloc=0 CPUTot=16 Gres=(null) RealMemory=1 State=IDLE
"""


def test_node_table_is_read_and_its_free_text_is_not() -> None:
    bare, shared = nodes_of_table(TABLE, {"n2": ("main", "small")})
    assert (bare.name, bare.usable, bare.gpu_count, bare.gpus_allocated, bare.partitions) == ("n1", True, 0, 0, ())
    assert (shared.state, shared.usable, shared.partitions) == ("MIXED+DRAIN", False, ("main", "small"))
    assert (bare.cpu_count, shared.cpu_count, shared.cpus_allocated) == (16, 14, 3)
    assert (shared.mem_mib, shared.mem_allocated_mib, shared.threads_per_core) == (64000, 8000, 2)
    assert (bare.mem_mib, bare.mem_allocated_mib, bare.threads_per_core) == (0, 0, 1)  # it was not configured
    assert (shared.gpu_count, shared.gpus_allocated, shared.gpu_type) == (2, 1, "a100")


def test_a_node_that_cannot_be_read_costs_itself(caplog: pytest.LogCaptureFixture) -> None:
    assert [node.name for node in nodes_of_table(TABLE.replace("CPUAlloc=3", "CPUAlloc=x"), {})] == ["n1"]
    assert "NodeName=n2" in caplog.text


class StandInJob:
    """A job of pyslurm's with a name that is not UTF-8."""

    @property
    def name(self) -> str:
        return b"caf\xe9".decode()


def test_texts_of_any_encoding_keep_their_bytes() -> None:
    assert pyslurm_records.LenientRecord(StandInJob()).name == "caf\udce9"


@pytest.mark.parametrize(
    ("pyslurm", "library", "fits"),
    [
        ("25.11.2", "25.11", True),
        ("25.11.2", "26.05", True),
        ("24.11.0", "25.05", False),
        ("27.05.0", "", True),
    ],
)
def test_pyslurm_must_fit_libslurm(pyslurm: str, library: str, fits: bool) -> None:
    if fits:
        check_library(pyslurm, library)
        return
    with pytest.raises(GatewayUnavailableError, match=r"gateway: command") as caught:
        check_library(pyslurm, library)
    assert pyslurm in str(caught.value)
    assert library in str(caught.value)


def test_libslurm_must_not_be_newer_than_slurmctld() -> None:
    for slurmctld in ("26.05.5", "26.11.0", "27.05.1"):
        check_controller(slurmctld, "26.05")
    with pytest.raises(GatewayUnavailableError, match=r"26\.05, newer than slurmctld 25\.11\.3"):
        check_controller("25.11.3", "26.05")


class Commands:
    name = "command"

    def __init__(self, *_: object) -> None:
        self.slurm_calls: Counter[str] = Counter()


def test_auto_falls_back_and_tells_only_who_asks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pyslurm", None)
    monkeypatch.setattr(open_gateway, "CommandGateway", Commands)
    told: list[GatewayUnavailableError] = []
    with caplog.at_level(logging.DEBUG):
        assert open_gateway.open_gateway("auto").name == "command"
        assert open_gateway.open_gateway("auto", told.append).name == "command"
    assert [type(each) for each in told] == [NoPyslurmError]
    assert not caplog.records
    with pytest.raises(GatewayUnavailableError, match="gateway: command"):
        open_gateway.open_gateway("pyslurm")


def test_a_libslurm_that_cannot_be_called_leaves_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyslurm_api, "import_pyslurm", lambda: SimpleNamespace(__version__="25.11.2"))
    monkeypatch.setattr(pyslurm_records.ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr(open_gateway, "CommandGateway", Commands)
    told: list[GatewayUnavailableError] = []
    assert open_gateway.open_gateway("auto", told.append).name == "command"
    assert "libslurm cannot be called" in str(told[0])


def test_advice_on_pyslurm_is_logged_when_the_gateway_changes_and_not_at_each_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slurm = FakeSlurm([], [])
    config = Config(state_dir=tmp_path, status_dir=tmp_path / "status")

    def opened(kind: str, note: Callable[[GatewayUnavailableError], None]) -> FakeSlurm:
        note(GatewayUnavailableError("pyslurm 24.11 was made for Slurm 24.11"))
        return slurm

    monkeypatch.setattr(open_gateway, "open_gateway", opened)
    told = []
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO), open_gateway.open_controller(config, looping=True) as controller:
            controller.cycle()
        told.append([(each.levelname, each.getMessage()) for each in caplog.records if "speaking" in each.msg])
    by = "speaking to Slurm by the gateway fake"
    assert told == [[("WARNING", f"{by}: pyslurm 24.11 was made for Slurm 24.11")], [("INFO", by)]]


def test_change_is_translated() -> None:
    change = JobChange(
        gpu_request="gres/gpu:a100:0", required_nodes="", cpu_count=1, cpus_per_task=1, dependency="",
        mem_per_node_mib=64, time_limit_s=61, admin_comment="x",
    )  # fmt: skip
    assert pyslurm_records.change_fields(change) == {
        "gres_per_node": "gpu:a100:0", "required_nodes": "", "dependencies": "", "admin_comment": "x",
        "min_cpus_per_node": 1, "cpus_per_task": 1, "memory_per_node": "64M", "time_limit": 2,
    }  # fmt: skip
    assert pyslurm_records.change_fields(JobChange()) == {}
    assert pyslurm_records.change_fields(JobChange(time_limit_s=0)) == {"time_limit": "unlimited"}
    assert pyslurm_records.change_fields(JobChange(start_now=True)) == {"begin_time": "now+2"}
    assert pyslurm_records.change_fields(JobChange(licenses="m:1")) == {"licenses": "m:1"}
    assert pyslurm_records.change_fields(JobChange(mem_per_cpu_mib=500)) == {"memory_per_cpu": "500M"}
    assert pyslurm_records.change_fields(JobChange(oversubscribe=True)) == {"resource_sharing": "yes"}
    assert pyslurm_records.change_fields(JobChange(oversubscribe=False)) == {}
    cleared = pyslurm_records.change_fields(JobChange(licenses=""))["licenses"]
    assert (bool(cleared), cleared[0] != "\0", len(cleared), cleared.encode()) == (True, True, 0, b"")
    with pytest.raises(GatewayError, match="malformed"):
        pyslurm_records.change_fields(JobChange(gpu_request="??:"))


def test_broken_pyslurm_is_told_from_a_missing_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pyslurm.py").write_text("raise ImportError('libslurm.so.44: cannot open shared object file')")
    monkeypatch.delitem(sys.modules, "pyslurm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(GatewayUnavailableError, match=r"libslurm\.so\.44.*Rebuild"):
        import_pyslurm()


def test_a_change_that_pyslurm_cannot_express_whole_is_made_whole_by_scontrol(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, JobChange]] = []

    monkeypatch.setattr(CommandGateway, "modify", lambda _gateway, *asked: made.append(asked))
    gateway = object.__new__(pyslurm_api.PyslurmGateway)
    member = JobChange(gpu_request="gres/gpu:0", cpu_count=1, cpus_per_task=1, admin_comment="muri:x", licenses="")
    gateway.modify(7, member)  # one RPC, so all of it or nothing
    assert made == [(7, member)]
