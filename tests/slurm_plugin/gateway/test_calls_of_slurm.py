"""How often Slurm is called, by kind: the cost of a cycle for slurmctld must not creep up unseen."""

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fake_slurm import FakeSlurm, make_node
from recorded_slurm import RecordedCommands, recorded

from muri.slurm_plugin.controller.status import STATUS_NAME, read_status
from muri.slurm_plugin.gateway import pyslurm_api
from muri.slurm_plugin.gateway.base import Calls, kind_of
from muri.slurm_plugin.gateway.commands import CommandGateway
from muri.slurm_plugin.gateway.pyslurm_api import PyslurmGateway

NEW = "26.05.5"


class CountedCommands(RecordedCommands):
    """Recorded commands, counted as the real ones are."""

    def __init__(self) -> None:
        super().__init__(NEW)
        self.calls: Calls = Counter()  # type: ignore[assignment]
        self.texts |= {"reservation": "", "partition": "PartitionName=main State=UP\n"}
        for row in self.rows:
            row["admin_comment"] = "muri:model=m"

    def run(self, action: str, arguments: Sequence[str]) -> str:
        self._count(arguments)
        return super().run(action, arguments)

    def output(self, action: str, arguments: Sequence[str], variables: dict[str, str] | None = None) -> bytearray:
        self._count(arguments)
        return super().output(action, arguments, variables)

    def _count(self, arguments: Sequence[str]) -> None:
        if kind := kind_of(arguments):
            self.calls[kind] += 1


def cost(gateway: Any) -> dict[str, int]:
    """Calls of one snapshot and one extension of the lease: a cycle that finds nothing to do."""
    before = gateway.slurm_calls.copy()
    gateway.snapshot()
    gateway.extend_lease(1e10)
    return dict(gateway.slurm_calls - before)


def test_the_kinds_that_dashboards_of_a_site_name_keep_their_spelling() -> None:
    shown = ["reservation", "partition", "config", "license", "burst"]
    kinds = [kind_of(["scontrol", "--oneliner", "show", what]) for what in shown]
    assert kinds == ["reservations", "partitions", "configuration", "licenses", "other"]


def test_a_cycle_through_commands_runs_three() -> None:
    gateway = CommandGateway(CountedCommands())  # type: ignore[arg-type]
    first = cost(gateway)
    assert first.pop("job") == 8  # all that the new jobs ask for
    assert first.pop("configuration") == first.pop("partitions") == first.pop("reservations") == 1
    assert first == {"jobs": 1, "nodes": 1, "lease": 1}
    assert cost(gateway) == cost(gateway) == {"jobs": 1, "nodes": 1, "lease": 1}


def test_a_new_job_and_a_request_that_muri_has_changed_cost_one_small_call_once() -> None:
    commands = CountedCommands()
    gateway = CommandGateway(commands)  # type: ignore[arg-type]
    gateway.snapshot()
    commands.rows.append(commands.rows[5] | {"JobID": "5000"})
    commands.shown[5000] = commands.shown[6]
    assert cost(gateway) == {"jobs": 1, "nodes": 1, "lease": 1, "job": 1}
    assert cost(gateway) == {"jobs": 1, "nodes": 1, "lease": 1}
    commands.rows[5] |= {"tres-per-node": "gres/gpu:0,gres/muri:1", "MinMemory": "64M"}
    assert cost(gateway)["job"] == 1
    assert cost(gateway) == {"jobs": 1, "nodes": 1, "lease": 1}


class Library:
    """libslurm."""

    def release(self) -> str:
        return "26.05"

    def node_table(self) -> str:
        return str(recorded(NEW)["nodes"])

    def reservation_table(self) -> str:
        return ""


class PyslurmJob:
    """A job of pyslurm's whose attributes say nothing but its tag."""

    id = user_id = group_id = 6
    state, admin_comment, partition = "PENDING", "muri:model=m", "main"
    num_nodes = cpus = ntasks = cpus_per_task = 1

    def __getattr__(self, _name: str) -> Any:
        return None


@pytest.fixture
def pyslurm(monkeypatch: pytest.MonkeyPatch) -> list[PyslurmJob]:
    """A pyslurm whose jobs a test may change."""
    jobs = [PyslurmJob()]
    config = SimpleNamespace(cluster_name="muri", version=NEW, state_save_location="/nowhere")
    nodes = {name: SimpleNamespace(name=name, partitions=["main"]) for name in ("n1", "n2", "n3", "n4")}
    module = SimpleNamespace(
        __version__="25.11.2",
        RPCError=OSError,
        slurmctld=SimpleNamespace(Config=SimpleNamespace(load=lambda: config)),
        Jobs=SimpleNamespace(load=lambda: {job.id: job for job in jobs}),
        Nodes=SimpleNamespace(load=lambda: nodes),
    )
    monkeypatch.setattr(pyslurm_api, "import_pyslurm", lambda: module)
    monkeypatch.setattr(pyslurm_api, "Libslurm", Library)
    return jobs


def test_a_cycle_through_pyslurm_makes_two_calls_beside_the_lease(pyslurm: list[PyslurmJob]) -> None:
    commands = CountedCommands()
    gateway = PyslurmGateway(commands)  # type: ignore[arg-type]
    first = cost(gateway)
    assert (first["jobs"], first["nodes"], first["job"]) == (1, 2, 1)  # the nodes' partitions the first time
    commands.asked.clear()
    assert cost(gateway) == cost(gateway) == {"jobs": 1, "nodes": 1, "lease": 1}
    assert [words[1] for words in commands.asked] == ["update", "update"]  # no other command is run
    pyslurm[0].gres_per_node = {"gpu": 0, "muri": 1}  # a member has no hidden GPUs
    assert cost(gateway) == {"jobs": 1, "nodes": 1, "lease": 1}


def test_an_idle_cycle_reads_once_and_extends_the_lease(make_controller) -> None:
    slurm = FakeSlurm([], [make_node("n1")], gate_license=True)
    snapshot = slurm.snapshot

    def counted() -> Any:
        slurm.slurm_calls["jobs"] += 1
        slurm.calls.append("snapshot")
        return snapshot()

    slurm.snapshot = counted  # type: ignore[method-assign]
    with make_controller(slurm) as controller:
        controller.cycle()
        slurm.calls.clear()
        status = controller.cycle()
        assert slurm.calls == ["snapshot"]
        assert slurm.lease_end_s > slurm.now_s
        assert status.slurm_calls == {"jobs": 1}
        assert read_status(controller._config.state_dir / STATUS_NAME).slurm_calls == {"jobs": 1}
        assert controller.books._values["muri_slurm_calls"] == {("jobs",): 2.0}
