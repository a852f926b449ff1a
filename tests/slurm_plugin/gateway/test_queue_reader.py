"""Reading the queue: what squeue cannot print, the details that only scontrol shows, and the tags alone for a drain."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
from fake_slurm import make_job
from recorded_slurm import RecordedCommands, row

from muri.slurm_plugin.gateway import queue_reader
from muri.slurm_plugin.gateway.base import (
    CommandTimeoutError,
    GatewayError,
    NoSuchJobError,
    SlurmUnreachableError,
    TooLongAnswerError,
    kind_of,
)
from muri.slurm_plugin.gateway.commands import CommandGateway
from muri.slurm_plugin.gateway.queue_reader import (
    TAGGED_FIELDS,
    ArrayRecords,
    DetailsReader,
    QueueReader,
    read_tagged_jobs,
)
from muri.slurm_plugin.gateway.slurm_commands import LinesWith
from muri.slurm_plugin.gateway.squeue import known_fields
from muri.slurm_plugin.gateway.text_fields import details_of
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.roles import Role, read_job


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
    monkeypatch.setattr(queue_reader, "_PARTS_WITHIN_S", -1.0)
    with pytest.raises(SlurmUnreachableError, match="in parts"):
        reader(FailingCommands({7}, CommandTimeoutError("too slow"))).read(0.0)


def test_a_squeue_that_is_too_slow_for_every_job_is_no_empty_queue() -> None:
    with pytest.raises(CommandTimeoutError):
        reader(FailingCommands(set(range(1, 101)), CommandTimeoutError("too slow"))).read(0.0)


def test_a_squeue_that_does_not_list_its_fields_is_asked_for_what_every_release_has() -> None:
    commands = RecordedCommands("22.05.8")
    assert len(CommandGateway(commands).queue().jobs) == len(commands.rows)  # type: ignore[arg-type]


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


PLAIN = "JobId={} JobName=a UserId=alice(1001) ExcNodeList=(null) MinMemoryNode=5M Command=/x WorkDir=/home\n"


class Scontrol:
    def __init__(self, *texts: str) -> None:
        self.texts = dict(enumerate(texts, start=1))
        self.asked: list[int] = []

    def __call__(self, job_id: int) -> bytes:
        self.asked.append(job_id)
        if job_id and job_id not in self.texts:
            raise NoSuchJobError("Invalid job id specified")
        return (self.texts[job_id] if job_id else "".join(self.texts.values())).encode()


def many(count: int) -> list[str]:
    return [PLAIN.format(number) for number in range(1, count + 1)]


def test_a_job_is_asked_for_once_and_anew_when_it_has_changed_and_forgotten_when_it_is_gone() -> None:
    slurm = Scontrol(*many(2))
    reader = DetailsReader(slurm)
    for _ in range(2):
        assert set(reader.read({1: "a", 2: "a"})) == {1, 2}
    assert slurm.asked == [1, 2]
    assert set(reader.read({2: "b"})) == {2}
    reader.read({1: "a", 2: "b"})
    assert slurm.asked == [1, 2, 2, 1]


def test_many_new_jobs_are_asked_for_together() -> None:
    slurm = Scontrol(*many(1000))
    assert len(DetailsReader(slurm).read(dict.fromkeys(range(1, 1001)))) == 1000
    assert slurm.asked == [0]


def test_a_text_that_pretends_to_be_another_job_is_found_out() -> None:
    forged = PLAIN.format(3).rstrip() + " Comment=x\nJobId=7 JobName=a SpreadJob=Yes Extra=y\n"
    texts = many(20)
    texts[2] = forged
    slurm = Scontrol(*texts)
    told = DetailsReader(slurm).read(dict.fromkeys(range(1, 21)))
    assert slurm.asked == [0, 7]
    assert told[7] == told[8] == details_of(PLAIN.format(8))


def test_whoever_pretends_to_be_many_jobs_keeps_none_of_them_from_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_reader, "_MOST_ALONE", 5)
    texts = many(20)
    texts[2] += "".join(f"JobId={number} JobName=a\n" for number in range(1, 21) if number != 3)
    read: set[int] = set()
    for _ in range(300):  # a controller that a timer starts remembers nothing
        told = DetailsReader(Scontrol(*texts)).read(dict.fromkeys(range(1, 21)))
        assert len(told) == 6
        read |= set(told)
    assert read == set(range(1, 21))


def test_what_a_user_writes_adds_to_his_own_job_only() -> None:
    told = details_of(PLAIN.format(1).replace("d=/x", "d=/x SpreadJob=No SpreadJob=Yes ExpeditedRequeue=Yes"))
    assert told.flags == ("EXPEDITED_REQUEUE", "SPREAD_JOB")


def test_an_answer_that_is_too_long_costs_the_jobs_that_make_it_so() -> None:
    slurm = Scontrol(*many(30))

    def show(job_id: int) -> bytes:
        if job_id in (0, 7):
            raise TooLongAnswerError("too long")
        return slurm(job_id)

    assert set(DetailsReader(show).read(dict.fromkeys(range(1, 31)))) == set(range(1, 31)) - {7}


def test_a_job_that_is_gone_has_no_details_and_is_no_error() -> None:
    assert DetailsReader(Scontrol(*many(2))).read({9: None}) == {}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(SlurmUnreachableError("away"), pytest.raises(SlurmUnreachableError)), (GatewayError("refused"), nullcontext())],
)
def test_only_a_slurmctld_that_does_not_answer_ends_the_reading(error: GatewayError, outcome: Any) -> None:
    with outcome:
        assert DetailsReader(Mock(side_effect=error)).read({1: None}) == {}


def test_a_submit_line_is_read_to_its_end() -> None:
    text = "JobId=1 Command=(null) SubmitLine=sbatch a b=c\n d WorkDir=/home/alice AdminComment=x\n"
    assert details_of(text).submit_line == "sbatch a b=c\n d"


def test_an_arrays_limit_is_told_by_its_own_record() -> None:
    told = details_of("JobId=20 ArrayJobId=20 ArrayTaskId=0-5 ArrayTaskThrottle=2 JobName=a ArrayTaskThrottle=9 \n")
    assert told.array_limit == 2
    assert details_of(PLAIN.format(1)).array_limit == 0
    forged = f"{PLAIN.format(1)}JobId=1 ArrayJobId=1 ArrayTaskId=1 ArrayTaskThrottle={'9' * 5000} "
    assert details_of(forged).array_limit == 0, "a user's text costs no snapshot"


OF_ANY: Mapping[str, object] = {
    "State": "PENDING", "PriorityLong": 1, "ArrayTaskID": "N/A", "Licenses": "(null)", "Nice": -3,
    "Dependency": "(null)", "UserID": 1001, "GroupID": 1002,
}  # fmt: skip


class TagCommands:
    """squeue, which prints lines whose fields are parted by `|` here."""

    def __init__(self, *lines: str) -> None:
        self.text = "".join(f"{each}\n" for each in lines)
        self.asked = ""

    def lines(
        self, action: str, arguments: Sequence[str], word: bytes, longest: int, variables: Mapping[str, str]
    ) -> list[bytes]:
        self.asked = variables["SQUEUE_FORMAT2"]
        mark = self.asked.partition(":0")[2].partition(",")[0]
        found = LinesWith(word, longest)
        found.take(self.text.replace("|", mark).encode("utf-8", "surrogateescape"))
        return found.lines()


def line(job_id: object, reason: str, comment: str, **changes: object) -> str:
    values = OF_ANY | {"JobID": job_id, "ArrayJobID": job_id, "Reason": reason, "admin_comment": comment} | changes
    return "".join(f"{values[name]}|" for name in TAGGED_FIELDS)


def test_tagged_jobs_are_read_and_nothing_else():
    commands = TagCommands(
        line(1, "Licenses", "site=x muri:model=a muri-gate:licence", Licenses="matlab:1,muri_gate:1"),
        line(2, "JobHeldAdmin", "muri:model=a muri-gate:licence", PriorityLong=0, Licenses="muri_gate:1"),
        line(3, "JobHeldUser", "muri:on", PriorityLong=0, Dependency="after:9_2(unfulfilled)"),
        line(4, "None", "muri-pilot:f00d:1,2", State="RUNNING"),
        line(5, "None", "of another tool", State="RUNNING"),
        line(6, "Dependency", "of another tool\nmuri:on 7|7|PENDING|muri:"),
        line("x", "None", "muri:on"),
        "\udce9 \x1b[31m muri:on",
        line(8, "None", "muri:on") + "muri",
        line(9, "None", "muri:on").removesuffix("|"),
    )
    jobs = {job.job_id: read_job(job) for job in read_tagged_jobs(commands).jobs}
    assert sorted(jobs) == [1, 2, 3, 4]
    assert [jobs[n].role for n in (1, 2, 3, 4)] == [Role.CANDIDATE, Role.USER_HELD, Role.CANDIDATE, Role.PILOT]
    assert jobs[1].licenses == "matlab:1,muri_gate:1"
    assert [(jobs[n].nice, jobs[n].dependency) for n in (1, 3)] == [(-3, ""), (-3, "after:9_2")]
    assert jobs[4].state is JobState.RUNNING
    assert {(job.uid, job.gid) for job in jobs.values()} == {(1001, 1002)}
    asked = commands.asked.lower()
    assert not any(text in asked for text in ("name", "command", "workdir", "std"))


def test_records_of_an_array_are_told_apart():
    gated = {"Licenses": "muri_gate:1", "ArrayJobID": 10}
    tasks = [
        line(n, "Licenses", "muri:on muri-gate:licence", ArrayTaskID=t, **gated)
        for n, t in ((10, "4-9,12%3"), (11, "3"))
    ]
    jobs = {job.job_id: job for job in read_tagged_jobs(TagCommands(*tasks)).jobs}
    assert {job_id: job.name_in_slurm for job_id, job in jobs.items()} == {10: "10_[4-9,12]", 11: "10_3"}
    assert read_job(jobs[11]).role is Role.CANDIDATE


def test_long_licenses_and_tags_are_read_whole():
    licenses = ",".join(f"site{n}:1" for n in range(10_000)) + ",muri_gate:1"
    comment = "muri:on " + "site " * 4000 + "muri-gate:licence"
    jobs = read_tagged_jobs(
        TagCommands(line(1, "Licenses", comment, Licenses=licenses), line(2, "None", "muri:on"))
    ).jobs
    assert [(job.licenses, job.admin_comment) for job in jobs] == [(licenses, comment), ("", "muri:on")]


def test_a_line_of_a_monstrous_length_is_left_out_with_a_warning(caplog):
    huge = line(4711, "None", "muri:on", Licenses="x:1," * 2_000_000)
    assert [job.job_id for job in read_tagged_jobs(TagCommands(huge, line(2, "None", "muri:on"))).jobs] == [2]
    assert "left out, which begins with '4711<" in caplog.text
