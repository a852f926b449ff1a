"""Conclusions from Slurm's answers to a try to take GPUs away; tests/slurm asks real ones."""

import itertools
import json
from collections.abc import Sequence

import pytest
from fake_slurm import NOW_S, make_job, make_node
from virtual_clock import VirtualClock

from muri.slurm_plugin.gateway.base import GatewayError, SlurmUnreachableError
from muri.slurm_plugin.gateway.gpu_removal import (
    FILE_NAME,
    GpuRemovalFile,
    find_gpu_removal,
    place_for,
    read_gpu_removal,
)
from muri.slurm_plugin.records.cluster import Snapshot
from muri.slurm_plugin.records.limits import NOT_TRIED, GpuRemoval, Place, TriedForm

MAIN = Place("main", "gpu")
TAGGED = make_job(7, admin_comment="muri:model=a", account="hep", qos="short")


class ScriptedCommands:
    """Commands of a Slurm that counts GPUs as TRES (or not), and takes them away in some ways.

    Args:
        ways: Requests that take GPUs away.
        counts: Whether ReqTRES has GPUs.
        known_gres: Whether it has the GRES `muri`.
        refuses_root: Whether root may not submit.
        starts: Whether a released job starts.
    """

    def __init__(self, *ways: str, counts=True, known_gres=True, refuses_root=False, starts=True) -> None:
        self.ways, self.counts, self.known_gres, self.starts = ways, counts, known_gres, starts
        self.refuses_root = refuses_root
        self.boot_s = 1
        self.lines: list[str] = []
        self.gpus: dict[str, bool] = {}
        self.released: set[str] = set()
        self._ids = itertools.count(100)

    def run(self, action: str, arguments: Sequence[str]) -> str:
        self.lines.append(" ".join(arguments))
        return str(getattr(self, f"_{arguments[0]}")(arguments))

    def _scancel(self, arguments: Sequence[str]) -> str:
        assert arguments[1].isdigit() or "--user=root" in arguments, "users' jobs may have the probe's name"
        self.gpus.pop(arguments[1], None)
        return ""

    def _sbatch(self, arguments: Sequence[str]) -> str:
        if self.refuses_root and not any(word.startswith("--uid=") for word in arguments):
            raise GatewayError("cannot submit: Invalid account or account/partition combination specified")
        job_id = str(next(self._ids))
        self.gpus[job_id] = True
        return f"{job_id};cluster\n"

    def _scontrol(self, arguments: Sequence[str]) -> str:
        if arguments[1:] == ["show", "config"]:
            return f"SLURM_VERSION = 24.11.5\nBOOT_TIME = {self.boot_s}\nGresTypes = gpu,muri\n"
        if arguments[1] == "update":
            assert arguments[3] == "MinMemoryNode=64", "without memory of its own it would wait for all of a node's"
            way = arguments[4].removeprefix("TresPerNode=")
            if "muri" in way and not self.known_gres:
                raise GatewayError("cannot change job 1: Invalid generic resource (gres) specification for job 1")
            self.gpus[arguments[2].removeprefix("JobId=")] &= way not in self.ways
            return ""
        if arguments[1] == "release":
            self.released.add(arguments[2])
            return ""
        has = self.gpus[arguments[-1]]
        runs = self.starts and arguments[-1] in self.released
        tres = ",gres/gpu=1" if has and self.counts else ""
        return (
            f"JobState={'RUNNING' if runs else 'PENDING'} ReqTRES=cpu=1{tres} JOB_GRES={'gpu:1' if has else 'muri:1'}"
        )


def tried(commands: ScriptedCommands, known: GpuRemoval = NOT_TRIED, place: Place = MAIN, waiting=None):
    return find_gpu_removal(commands, known, place, waiting, NOW_S, VirtualClock())


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize(
    ("ways", "request_for_members"),
    [
        (("gres/gpu:0,gres/muri:1", "gres/gpu:0"), "gres/gpu:0,gres/muri:1"),
        (("gres/gpu:0",), "gres/gpu:0"),
        ((), ""),
    ],
)
def test_the_better_way_that_works_is_taken(counts, ways, request_for_members) -> None:
    commands = ScriptedCommands(*ways, counts=counts)
    found = tried(commands)
    assert found.way_for("gres/gpu:1").request == request_for_members
    assert found.holds(found.site, NOW_S + 1e9)
    assert commands.gpus == {}, "every job that was tried with is cancelled"


def test_a_missing_gres_is_an_answer_and_no_fault() -> None:
    found = tried(ScriptedCommands("gres/gpu:0,gres/muri:1", known_gres=False))
    [form] = found.forms
    assert form.request == ""
    assert (
        form.why
        == "gres/gpu:0,gres/muri:1: slurm.conf has no such GRES; gres/gpu:0: Slurm accepts it and keeps the GPU"
    )
    assert form.conclusive


def test_typed_gpus_are_tried_by_themselves() -> None:
    commands = ScriptedCommands("gres/gpu:0")
    found = tried(commands, place=Place("main", "tesla"))
    assert [form.form for form in found.forms] == ["--gres=gpu:N", "--gres=gpu:TYPE:N"]
    assert any("--gres=gpu:tesla:1" in line for line in commands.lines)
    assert found.way_for("gres/gpu:tesla:2").request == "gres/gpu:0"


def test_where_root_may_not_submit_it_is_tried_in_the_name_of_a_waiting_job() -> None:
    commands = ScriptedCommands("gres/gpu:0", refuses_root=True)
    assert tried(commands, waiting=TAGGED).way_for("gres/gpu:1").request == "gres/gpu:0"
    own = next(line for line in commands.lines if "--uid=" in line)
    assert f"--uid={TAGGED.uid} --gid={TAGGED.gid} --partition={TAGGED.partition} --account=hep --qos=short" in own


def test_a_refusal_and_a_job_that_does_not_start_are_no_answers() -> None:
    """Neither is remembered for long, and other forms are not waited for."""
    for commands in (ScriptedCommands(refuses_root=True), ScriptedCommands(counts=False, starts=False)):
        found = tried(commands)
        assert found.way_for("gres/gpu:1").request == ""
        assert not found.forms[0].conclusive
        assert found.holds(found.site, NOW_S + 1)
        assert not found.holds(found.site, NOW_S + 3600)
        assert commands.gpus == {}


def test_it_is_tried_once_for_each_start_of_slurmctld() -> None:
    commands = ScriptedCommands("gres/gpu:0")
    first = tried(commands)
    commands.lines.clear()
    assert tried(commands, first) is first
    assert commands.lines == ["scontrol show config"]
    commands.boot_s += 1
    assert tried(commands, first) != first


def test_place_is_a_partition_with_gpus_that_muri_serves() -> None:
    nodes = (
        make_node("n1", partitions=("cpu",), gpu_count=0),
        make_node("n2", partitions=("old",), usable=False),
        make_node("n3", partitions=("debug", "train"), gpu_type="a100"),
    )
    assert place_for(nodes, ()) == Place("debug", "a100")
    assert place_for(nodes, ("train",)) == Place("train", "a100", served=("train",))
    assert place_for(nodes, ("old",)) == Place("old", "gpu", served=("old",))
    assert place_for(nodes, ("cpu",)) is None


@pytest.mark.parametrize("ways", [("gres/gpu:0",), ()])
def test_what_was_found_out_holds_for_the_partitions_that_it_was_found_out_in(ways) -> None:
    commands = ScriptedCommands(*ways)
    known = tried(commands, place=Place("main", "gpu", served=("main", "old")))
    probes = len(commands.lines)
    assert tried(commands, known, Place("main", "gpu", served=("main", "old"))) == known
    assert len(commands.lines) == probes + 1
    tried(commands, known, Place("main", "gpu", served=("main",)))
    assert len(commands.lines) > probes + 2


def test_a_partition_that_was_mistyped_and_mended_is_tried_in_at_the_next_cycle(tmp_path) -> None:
    gateway = Gateway(FOUND)
    wrong = GpuRemovalFile(tmp_path, ("mian",)).current(gateway, snapshot(TAGGED))
    assert wrong.way_for("gres/gpu:1").why == "no node with GPUs is in a partition that Muri serves: mian"
    assert not (tmp_path / FILE_NAME).exists()
    assert GpuRemovalFile(tmp_path, ("main",)).current(gateway, snapshot(TAGGED)) == FOUND


class Gateway:
    """Counts how often it is asked."""

    def __init__(self, answer: GpuRemoval | Exception) -> None:
        self.answer, self.asked = answer, 0

    def gpu_removal(self, known, place, waiting, now_s):
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


FOUND = GpuRemoval("here", NOW_S, (TriedForm("--gres=gpu:N", "gres/gpu:0"),), "")


def snapshot(*jobs, taken_s: float = NOW_S) -> Snapshot:
    return Snapshot(taken_s, "c", "26.05", jobs, (make_node("n1"),))


def test_nothing_is_tried_before_a_job_waits_for_muri_or_by_who_only_looks(tmp_path) -> None:
    gateway = Gateway(FOUND)
    assert GpuRemovalFile(tmp_path, (), may_try=False).current(gateway, snapshot(TAGGED)) == NOT_TRIED
    file = GpuRemovalFile(tmp_path, ())
    assert file.current(gateway, snapshot(make_job(1, admin_comment=""))) == NOT_TRIED
    assert gateway.asked == 0
    assert file.current(gateway, snapshot(TAGGED)) == FOUND
    assert read_gpu_removal(tmp_path) == FOUND
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    file.current(gateway, snapshot(TAGGED, taken_s=NOW_S + 30))
    assert gateway.asked == 1
    file.current(gateway, snapshot(TAGGED, taken_s=NOW_S + 90))
    assert gateway.asked == 2


def test_what_cannot_be_found_out_costs_groups_alone(tmp_path) -> None:
    refused = GpuRemovalFile(tmp_path, ()).current(Gateway(GatewayError("no")), snapshot(TAGGED))
    assert refused.way_for("gres/gpu:1").why == "no"
    with pytest.raises(SlurmUnreachableError):
        GpuRemovalFile(tmp_path, ()).current(Gateway(SlurmUnreachableError("away")), snapshot(TAGGED))


@pytest.mark.parametrize("text", ["", "{", '{"forms": 3}', json.dumps({"forms": [{"form": 1}]})])
def test_a_damaged_file_means_that_nothing_was_tried(tmp_path, text) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    assert read_gpu_removal(tmp_path) == NOT_TRIED
