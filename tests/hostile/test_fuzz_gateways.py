"""Damaged records at the gateways: no exception leaves a snapshot, and what is not damaged is read."""

import json
import tracemalloc
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from damage import OddRecord, damaged, damaged_table
from odd import Odd

from muri.slurm_plugin.gateway import json_records
from muri.slurm_plugin.gateway.base import GatewayError, TooLongAnswerError
from muri.slurm_plugin.gateway.command_output import LinesWith
from muri.slurm_plugin.gateway.commands import CommandGateway
from muri.slurm_plugin.gateway.json_records import read_each
from muri.slurm_plugin.gateway.libslurm import nodes_of_table
from muri.slurm_plugin.gateway.pyslurm_records import job_record
from muri.slurm_plugin.gateway.reservation_table import reservations_of_table
from muri.slurm_plugin.gateway.tag_reader import read_tagged_jobs
from muri.slurm_plugin.records.cluster import Snapshot, dump_snapshot, parse_snapshot
from muri.slurm_plugin.records.roles import view_of

FIXTURES = Path(__file__).parents[1] / "slurm_plugin" / "fixtures"

CONFIG = """Configuration data as of 2026-01-01T00:00:00
AccountingStorageEnforce = associations,limits,qos
ClusterName             = muri
PriorityType            = priority/multifactor
SLURM_VERSION           = 26.05.5
StateSaveLocation       = /var/spool/slurmctld
"""

NODES = """\
NodeName=n2 Arch=x86_64 CPUAlloc=3 CPUEfctv=16 CPUTot=16 Gres=gpu:a100:2 GresUsed=gpu:a100:1(IDX:0) RealMemory=64000 \
AllocMem=100 MemSpecLimit=1 State=ALLOCATED+DRAIN ThreadsPerCore=1 AvailableFeatures=a,b Reason=State=IDLE CPUTot=99
NodeName=n1 CPUAlloc=0 CPUTot=16 Gres=(null) State=IDLE ThreadsPerCore=1
"""

RESERVATIONS = """\
ReservationName=muri_gate StartTime=1000000 EndTime=1000600 Nodes=(null) Flags=LICENSE_ONLY Licenses=muri_gate:1000000
ReservationName=maint StartTime=2026-01-01T00:00:00 EndTime=2026-01-02T00:00:00 Nodes=n[1-2] Flags=MAINT,SPEC_NODES
"""

PARTITIONS = """\
PartitionName=gpu AllowGroups=ALL QoS=gpuqos Exclusive=NO MaxTime=2-00:00:00 State=UP MaxMemPerNode=64
PartitionName=whole QoS=N/A MaxTime=UNLIMITED OverSubscribe=EXCLUSIVE State=DRAIN MaxMemPerNode=UNLIMITED
"""

QOS = (
    "small|DenyOnLimit,OverPartQOS|2.000000|1-00:00:00|10|20|2|3|4|5|cpu=8|cpu=4|gres/gpu=600|gres/gpu=4|gres/gpu=2|"
    "gres/gpu=3|cpu=1\nnormal" + "|" * 16 + "\n"
)

ASSOCIATIONS = "root" + "|" * 12 + "\nhep|alice|||12:00:00||8|2|3|mem=4G|||gres/gpu=2\n"


def recorded(name: str) -> Any:
    return json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))


class Commands:
    """Slurm's commands, whose answers may be damaged."""

    def __init__(self, version: str) -> None:
        self.jobs = recorded(f"jobs-{version}")
        self.nodes = json.dumps(recorded(f"nodes-{version}"))
        self.texts = {"config": CONFIG, "reservation": RESERVATIONS, "partition": PARTITIONS, "qos": QOS}
        self.texts |= {"associations": ASSOCIATIONS}

    def run(self, action: str, arguments: Sequence[str]) -> str:
        if arguments[0] == "squeue":
            return self._queue(arguments)
        if "nodes" in arguments or arguments[0] == "sinfo":
            return self.nodes
        return next(text for name, text in self.texts.items() if name in arguments)

    def output(self, action: str, arguments: Sequence[str]) -> bytes:
        return self.run(action, arguments).encode()

    def _queue(self, arguments: Sequence[str]) -> str:
        if "--json=list" in arguments:
            return "v0.0.45\nv0.0.44\n"
        if any(word.startswith("--Format=JobID:") for word in arguments):
            return "\n".join(str(record["job_id"]) for record in self.jobs["jobs"])
        return json.dumps(self.jobs)


def checked(snapshot: Snapshot) -> Snapshot:
    """A snapshot is whole: its comments can be read, and its file says the same."""
    view_of(snapshot)
    assert parse_snapshot(dump_snapshot(snapshot)) == snapshot
    return snapshot


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("version", ["22.05.8", "26.05.5"])
def test_a_damaged_record_of_squeue_costs_itself(version, seed):
    odd, commands = Odd(seed), Commands(version)
    intact = {job.job_id: job for job in CommandGateway(commands).snapshot().jobs}
    hit = odd.random.randrange(len(commands.jobs["jobs"]))
    job_id = commands.jobs["jobs"][hit]["job_id"]
    commands.jobs["jobs"][hit] = damaged(odd, commands.jobs["jobs"][hit])
    found = checked(CommandGateway(commands).snapshot())
    jobs = {job.job_id: job for job in found.jobs}
    assert {number: jobs.get(number) for number in intact if number != job_id} == {
        number: job for number, job in intact.items() if number != job_id
    }


class Bounded(Commands):
    """Answers no more than 10 MB at once, as the real commands answer no more than 256 MiB."""

    def output(self, action: str, arguments: Sequence[str]) -> bytes:
        chosen = [word.removeprefix("--jobs=").split(",") for word in arguments if word.startswith("--jobs=")]
        records = [each for each in self.jobs["jobs"] if not chosen or str(each["job_id"]) in chosen[0]]
        answer = json.dumps(self.jobs | {"jobs": records}, ensure_ascii=False).encode()
        if len(answer) > 10_000_000:
            raise TooLongAnswerError("too long")
        return answer


@pytest.mark.parametrize("sign", ["x", "é", "😀"])
def test_huge_submit_lines_cost_others_nothing(sign):
    commands = Bounded("26.05.5")
    intact = {job.job_id: job for job in CommandGateway(commands).snapshot().jobs}
    hostile = commands.jobs["jobs"][0] | {"submit_line": sign + "sbatch " * 140_000}
    commands.jobs["jobs"] += [hostile | {"job_id": job_id} for job_id in range(5_000, 5_040)]
    commands.jobs["jobs"].append(hostile | {"job_id": 6_000, "submit_line": sign + "x" * 11_000_000})
    found = checked(CommandGateway(commands).snapshot())
    jobs = {job.job_id: job for job in found.jobs}
    assert {job_id: jobs.get(job_id) for job_id in intact} == intact
    assert len(jobs) == len(intact) + 40
    assert [each.job_id for each in found.unreadable] == [6_000]
    assert max(len(job.submit_line) for job in found.jobs) < 20_000


def test_an_emoji_in_a_huge_submit_line_does_not_multiply_the_memory():
    records = recorded("jobs-26.05.5")
    hostile = records["jobs"][0] | {"submit_line": "😀" + "sbatch " * 140_000}
    records["jobs"] += [hostile] * 20
    output = json.dumps(records, ensure_ascii=False).encode()
    tracemalloc.start()
    queue = json_records.read_queue(output, "squeue", 0.0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(queue.jobs) == len(records["jobs"])
    assert peak < 2 * len(output)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("what", ["config", "reservation", "partition", "qos", "associations", "nodes"])
def test_damaged_tables_cost_no_snapshot(what, seed):
    odd, commands = Odd(seed), Commands("26.05.5")
    gateway = CommandGateway(commands)
    jobs = gateway.snapshot().jobs
    if what == "nodes":
        commands.nodes = json.dumps(
            recorded("nodes-26.05.5") | {"nodes": damaged(odd, recorded("nodes-26.05.5")["nodes"])}
        )
    else:
        commands.texts[what] = damaged_table(odd, commands.texts[what])
        gateway._limits._read_again_s = float("-inf")
    assert checked(gateway.snapshot()).jobs == jobs


@pytest.mark.parametrize("seed", range(40))
def test_a_document_that_is_none_is_refused_with_a_sentence(seed):
    odd, document = Odd(seed), recorded("jobs-26.05.5")
    text = json.dumps(damaged(odd, document))
    try:
        json_records.read_queue(text[: odd.random.randrange(len(text))].encode(), "squeue", 0.0)
        json_records.read_queue(text.encode(), "squeue", 0.0)
    except GatewayError as error:
        assert str(error)


@pytest.mark.parametrize("seed", range(80))
def test_records_of_pyslurm_of_any_form_are_read_or_named(seed):
    jobs, unreadable = read_each([OddRecord(str(seed))], lambda job: job_record(job, 0.0), lambda job: job.id)
    assert len(jobs) + len(unreadable) == 1
    for job in jobs:
        checked(Snapshot(1.0, "c", "26.05", (job,), ()))


@pytest.mark.parametrize("seed", range(80))
def test_damaged_tables_of_libslurm_are_read_line_by_line(seed):
    odd = Odd(seed)
    nodes = nodes_of_table(damaged_table(odd, NODES), {"n1": ("main",)})
    reservations = reservations_of_table(damaged_table(odd, RESERVATIONS))
    checked(Snapshot(1.0, "c", "26.05", (), tuple({node.name: node for node in nodes}.values()), reservations))


@pytest.mark.parametrize("seed", range(40))
def test_a_drain_reads_damaged_lines(seed):
    line = f"{1:<12}{1:<12}{'PENDING':<16}{0:<22}{'JobHeldUser':<48}{'N/A':<64}{'(null)':<512}{'muri:on':<16384}"

    class Squeue:
        def lines(self, action: str, arguments: Sequence[str], word: bytes, longest: int) -> list[bytes]:
            found = LinesWith(word, longest)
            found.take(f"{line}\n{damaged_table(Odd(seed), line)}\n".encode("utf-8", "surrogatepass"))
            return found.lines()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jobs = read_tagged_jobs(Squeue()).jobs  # type: ignore[arg-type]
    assert jobs[0].job_id == 1
    view_of(Snapshot(1.0, "c", "26.05", jobs, ()))
