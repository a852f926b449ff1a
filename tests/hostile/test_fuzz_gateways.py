"""Damaged records at the gateways: no exception leaves a snapshot, and what is not damaged is read.

What Slurm prints is damaged in all its forms: documents of JSON, lines of fields, and records of pyslurm.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pytest
from odd import Odd
from recorded_slurm import VERSIONS, RecordedCommands

from muri.slurm_plugin.gateway.base import GatewayError, TooLongAnswerError
from muri.slurm_plugin.gateway.commands import CommandGateway
from muri.slurm_plugin.gateway.pyslurm_records import job_record
from muri.slurm_plugin.gateway.queue_reader import read_each, read_tagged_jobs
from muri.slurm_plugin.gateway.slurm_commands import LinesWith
from muri.slurm_plugin.gateway.squeue import FieldReader
from muri.slurm_plugin.records.cluster import Snapshot, dump_snapshot, parse_snapshot
from muri.slurm_plugin.records.roles import view_of

CONFIG = """Configuration data as of 2026-01-01T00:00:00
AccountingStorageEnforce = associations,limits,qos
ClusterName             = muri
PriorityType            = priority/multifactor
SLURM_VERSION           = 26.05.5
StateSaveLocation       = /var/spool/slurmctld
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

_DIGITS: Final = "9" * 5000


def value(odd: Odd) -> Any:
    """A value of any type."""
    number = {"set": odd.one((True, False, odd.figure())), "infinite": odd.figure(), "number": odd.figure()}
    return odd.one((odd.figure(), odd.text(), odd.json(), number, [odd.text()], _DIGITS, -odd.number(), [[]], [None]))


def damaged_table(odd: Odd, table: str) -> str:
    """Return a text of lines and fields with some of its words replaced, and others cut off."""
    lines = table.split("\n")
    for _ in range(odd.random.randrange(1, 5)):
        number = odd.random.randrange(len(lines))
        line = lines[number]
        at = odd.random.randrange(len(line) + 1)
        separators = [sign for sign in "=|, " if sign in line]
        if separators and odd.chance(0.6):
            sign = odd.random.choice(separators)
            words = line.split(sign)
            words[odd.random.randrange(len(words))] = str(value(odd))
            lines[number] = sign.join(words)
        else:
            lines[number] = odd.one((line[:at], line[at:], line[:at] + odd.text() + line[at:], line + line, odd.text()))
    return "\n".join(lines)


class OddRecord:
    """A record of pyslurm's whose attributes may be anything; reading one may fail as pyslurm's decoding does."""

    def __init__(self, seed: str) -> None:
        self._seed = seed

    def __getattr__(self, name: str) -> Any:
        """Return the attribute, always the same one."""
        if name == "id":
            return 7
        odd = Odd(f"{self._seed} {name}")
        if odd.chance(0.1):
            return (b"caf\xe9" + b"x" * odd.random.randrange(9)).decode()
        return odd.one((None, None, "", 0, 1, odd.count(), odd.text(), value(odd), {"gpu": odd.count()}, _Tres(odd)))


class _Tres:
    def __init__(self, odd: Odd) -> None:
        self.gres = {odd.one(("gpu", "gpu:a100", odd.text())): _Count(value(odd))}


class _Count:
    def __init__(self, count: Any) -> None:
        self.count = count


class Commands(RecordedCommands):
    """Slurm's commands, whose answers may be damaged; every job has Muri's tag."""

    def __init__(self, version: str) -> None:
        super().__init__(version)
        for row in self.rows:
            row["admin_comment"] = "muri:model=m"
        self.texts = {"config": CONFIG, "reservation": RESERVATIONS, "partition": PARTITIONS, "qos": QOS}
        self.texts |= {"associations": ASSOCIATIONS}


def checked(snapshot: Snapshot) -> Snapshot:
    """A snapshot is whole: its comments can be read, and its file says the same."""
    view_of(snapshot)
    assert parse_snapshot(dump_snapshot(snapshot)) == snapshot
    return snapshot


def seeds(count: int) -> list[Any]:
    """Some seeds, a quarter of them for `make test`."""
    return [pytest.param(seed, marks=() if seed < count // 4 else pytest.mark.thorough) for seed in range(count)]


@pytest.mark.parametrize("seed", seeds(40))
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("command", ["squeue", "scontrol"])
def test_what_is_damaged_of_a_job_costs_that_job_alone(command, version, seed):
    odd, commands = Odd(seed), Commands(version)
    intact = {job.job_id: job for job in CommandGateway(commands).snapshot().jobs}
    if command == "squeue":
        row = odd.random.choice(commands.rows)
        job_id = int(row["JobID"])
        for _ in range(odd.random.randrange(1, 5)):
            row[odd.random.choice([name for name in row if name != "JobID"])] = str(value(odd))
    else:
        job_id = odd.random.choice(list(commands.shown))
        commands.shown[job_id] = damaged_table(odd, commands.shown[job_id])
    found = {job.job_id: job for job in checked(CommandGateway(commands).snapshot()).jobs}
    assert {**found, job_id: None} == {**intact, job_id: None}


class Bounded(Commands):
    """Answers no more than 10 MB at once, as the real commands answer no more than 256 MiB."""

    def output(self, action: str, arguments: Sequence[str], variables: dict[str, str] | None = None) -> bytearray:
        answer = super().output(action, arguments, variables)
        if len(answer) > 10_000_000:
            raise TooLongAnswerError("too long")
        return answer


@pytest.mark.parametrize("sign", ["é", *(pytest.param(sign, marks=pytest.mark.thorough) for sign in ("x", "😀"))])
def test_huge_texts_cost_others_nothing(sign):
    commands = Bounded("26.05.5")
    intact = {job.job_id: job for job in CommandGateway(commands).snapshot().jobs}
    row, line = commands.rows[5], commands.shown[int(commands.rows[5]["JobID"])]
    for job_id in range(5_000, 5_040):
        commands.rows.append(row | {"JobID": str(job_id), "Comment": sign + "sbatch " * 140_000})
        commands.shown[job_id] = line.replace("SubmitLine=", f"SubmitLine={sign + 'sbatch ' * 140_000}")
    commands.rows.append(row | {"JobID": "6000", "Comment": sign + "x" * 11_000_000})
    commands.rows.append(row | {"JobID": "6001"})
    commands.shown |= {6000: line, 6001: line + "x" * 11_000_000}
    found = checked(CommandGateway(commands).snapshot())
    jobs = {job.job_id: job for job in found.jobs}
    assert {job_id: jobs.get(job_id) for job_id in intact} == intact
    assert len(jobs) == len(intact) + 40
    assert sorted(each.job_id for each in found.unreadable) == [6_000, 6_001]
    assert max(len(job.submit_line + job.comment) for job in found.jobs) < 40_000


@pytest.mark.parametrize("seed", seeds(30))
@pytest.mark.parametrize("what", ["config", "reservation", "partition", "qos", "associations", "nodes"])
def test_damaged_tables_cost_no_snapshot(what, seed):
    odd, commands = Odd(seed), Commands("26.05.5")
    gateway = CommandGateway(commands)
    jobs = gateway.snapshot().jobs
    if what == "nodes":
        commands.nodes = damaged_table(odd, commands.nodes)
    else:
        commands.texts[what] = damaged_table(odd, commands.texts[what])
        gateway._limits._read_again_s = gateway._reservations._read_again_s = float("-inf")
    assert checked(gateway.snapshot()).jobs == jobs


@pytest.mark.parametrize("seed", seeds(40))
def test_output_that_is_none_is_refused_with_a_sentence(seed):
    odd, reader = Odd(seed), FieldReader(("JobID", "Name"))
    text = "".join(f"{job_id}{reader.mark}name{reader.mark}\n" for job_id in range(9))
    try:
        list(reader.rows(text[: odd.random.randrange(len(text))].encode()))
        list(reader.rows(damaged_table(odd, text).encode("utf-8", "surrogatepass")))
    except GatewayError as error:
        assert str(error)


@pytest.mark.parametrize("seed", seeds(80))
def test_records_of_pyslurm_of_any_form_are_read_or_named(seed):
    jobs, unreadable = read_each([OddRecord(str(seed))], lambda job, _: job_record(job, 0.0), lambda job: job.id)
    assert len(jobs) + len(unreadable) == 1
    for job in jobs:
        checked(Snapshot(1.0, "c", "26.05", (job,), ()))


@pytest.mark.parametrize("seed", seeds(40))
def test_a_drain_reads_damaged_lines(seed):
    values = ("1", "1", "PENDING", "0", "JobHeldUser", "N/A", "(null)", "0", "(null)", "1001", "1001", "muri:on")

    class Squeue:
        def lines(
            self, action: str, arguments: Sequence[str], word: bytes, longest: int, variables: Mapping[str, str]
        ) -> list[bytes]:
            mark = variables["SQUEUE_FORMAT2"].partition(":0")[2].partition(",")[0]
            line = "".join(value + mark for value in values)
            found = LinesWith(word, longest)
            found.take(f"{line}\n{damaged_table(Odd(seed), line)}\n".encode("utf-8", "surrogatepass"))
            return found.lines()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jobs = read_tagged_jobs(Squeue()).jobs  # type: ignore[arg-type]
    assert jobs[0].job_id == 1
    view_of(Snapshot(1.0, "c", "26.05", jobs, ()))
