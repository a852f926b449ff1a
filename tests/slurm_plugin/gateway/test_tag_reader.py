"""A drain reads ids, states and tags, whatever else the queue holds."""

from collections.abc import Mapping, Sequence

from muri.slurm_plugin.gateway.queue_reader import TAGGED_FIELDS, read_tagged_jobs
from muri.slurm_plugin.gateway.slurm_commands import LinesWith
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.roles import Role, read_job

OF_ANY: Mapping[str, object] = {
    "State": "PENDING", "PriorityLong": 1, "ArrayTaskID": "N/A", "Licenses": "(null)", "Nice": -3,
    "Dependency": "(null)", "UserID": 1001, "GroupID": 1002,
}  # fmt: skip


class Commands:
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
    commands = Commands(
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
    jobs = {job.job_id: job for job in read_tagged_jobs(Commands(*tasks)).jobs}
    assert {job_id: job.name_in_slurm for job_id, job in jobs.items()} == {10: "10_[4-9,12]", 11: "10_3"}
    assert read_job(jobs[11]).role is Role.CANDIDATE


def test_long_licenses_and_tags_are_read_whole():
    licenses = ",".join(f"site{n}:1" for n in range(10_000)) + ",muri_gate:1"
    comment = "muri:on " + "site " * 4000 + "muri-gate:licence"
    jobs = read_tagged_jobs(Commands(line(1, "Licenses", comment, Licenses=licenses), line(2, "None", "muri:on"))).jobs
    assert [(job.licenses, job.admin_comment) for job in jobs] == [(licenses, comment), ("", "muri:on")]


def test_a_line_of_a_monstrous_length_is_left_out_with_a_warning(caplog):
    huge = line(4711, "None", "muri:on", Licenses="x:1," * 2_000_000)
    assert [job.job_id for job in read_tagged_jobs(Commands(huge, line(2, "None", "muri:on"))).jobs] == [2]
    assert "left out, which begins with '4711<" in caplog.text
