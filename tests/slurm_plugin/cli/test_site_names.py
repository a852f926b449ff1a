"""`muri config check` and `muri doctor` look for what muri.yaml names where Slurm answers."""

import sys
from dataclasses import replace

import pytest
from fake_slurm import FakeSlurm, make_node

from muri.cli import cli, run_command
from muri.slurm_plugin.cli import doctor_slurm
from muri.slurm_plugin.cli.doctor_slurm import names_in, wrong_python
from muri.slurm_plugin.config import Config, Pilot, Profiling
from muri.slurm_plugin.gateway.base import GatewayUnavailableError
from muri.slurm_plugin.records.limits import PartitionLimits, SiteLimits

NODES = [make_node("n1", partitions=("gpu",), gpu_type="a100"), make_node("n2", partitions=("cpu",), gpu_count=0)]


class OneQos:
    """slurmdbd, which knows some QOS."""

    def run(self, action, arguments):
        assert arguments[0] == "sacctmgr"
        return "normal\nmuri-pilots\n"


class NoAccounts(OneQos):
    def run(self, action, arguments):
        raise GatewayUnavailableError("cannot read the QOS: no slurmdbd")


@pytest.fixture
def slurm(monkeypatch):
    fake = FakeSlurm([], NODES)
    monkeypatch.setattr(doctor_slurm, "open_gateway", lambda kind: fake)
    return fake


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        (Config(partitions=("gpu", "empty"), gpu_mem_gib={"a100": 80}), ()),
        (Config(partitions=("gpuu",)), ("partitions: Slurm has no partition gpuu; did you mean gpu? it has cpu, ",)),
        (Config(profiling=Profiling(partition="dry")), ("profiling.partition: Slurm has no partition dry; it has ",)),
        (Config(gpu_mem_gib={"a100": 80, "h100": 80}), ("gpu_mem_gib: Slurm has no type of GPUs h100; ",)),
        (Config(pilot=Pilot(qos="normal")), ()),
        (Config(pilot=Pilot(qos="nope")), ("pilot.qos: Slurm has no QOS nope; it has muri-",)),
    ],
)
def test_a_name_that_slurm_lacks_is_a_problem_with_those_that_it_has(slurm, config, wrong):
    taken = replace(slurm.snapshot(), limits=SiteLimits((PartitionLimits("empty"),)))
    found = names_in(config, taken, OneQos())
    assert len(found.wrong) == len(wrong)
    assert all(told.startswith(begin) for told, begin in zip(found.wrong, wrong, strict=True))


def test_without_slurmdbd_it_says_that_it_could_not_look(slurm):
    found = names_in(Config(pilot=Pilot(qos="nope")), slurm.snapshot(), NoAccounts())
    assert found == ((), ("pilot.qos: cannot read the QOS: no slurmdbd",))


def test_a_python_that_is_not_there_is_a_problem(tmp_path):
    assert not [*wrong_python(Config(node_python=sys.executable))]
    (told,) = wrong_python(Config(node_python="/nope"))
    assert told.startswith("node_python: /nope is not a program on this machine")


def test_check_exits_with_2_where_slurm_answers(slurm, tmp_path, capsys):
    (tmp_path / "muri.yaml").write_text("partitions: [gpuu]\nnode_python: /nope\n")
    assert run_command(cli, ["config", "check", str(tmp_path / "muri.yaml")]) == 2
    told = capsys.readouterr().err
    assert "has 2 problem(s):\n  node_python: " in told
    assert "  partitions: " in told


def test_check_says_that_it_could_not_look_where_slurm_is_not(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "muri.yaml").write_text("partitions: [gpu]\n")
    assert run_command(cli, ["config", "check", str(tmp_path / "muri.yaml")]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{tmp_path}/muri.yaml: fine\nnot checked here: whether Slurm has the partitions")
    assert "scontrol" in told


def test_the_doctor_counts_them_as_problems(slurm, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor_slurm, "open_gateway", lambda *_: slurm)
    monkeypatch.setenv("PATH", "/nowhere")
    config = tmp_path / "muri.yaml"
    config.write_text(f"partitions: [gpuu]\nnode_python: /nope\nstate_dir: {tmp_path}\n")
    assert run_command(cli, ["doctor", "--config", str(config)]) == 1
    told = [line for line in capsys.readouterr().out.splitlines() if "muri.yaml's names" in line]
    assert [line.split()[0] for line in told] == ["PROBLEM", "PROBLEM"]
