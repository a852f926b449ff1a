"""What a drain reads: ids, states and tags, whatever else stands in the queue."""

from muri.slurm_plugin.gateway.tag_reader import read_tagged_jobs
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.roles import Role, read_job


class Commands:
    def __init__(self, text: str) -> None:
        self.text = text
        self.asked: list[str] = []

    def run(self, action: str, arguments: list[str]) -> str:
        self.asked += arguments
        return self.text


def line(job_id: object, state: str, priority: int, reason: str, licenses: str, comment: str) -> str:
    return f"{job_id:<12}{state:<16}{priority:<22}{reason:<48}{licenses:<512}{comment:<16384}"


LINES = "\n".join(
    [
        line(1, "PENDING", 4711, "Licenses", "matlab:1,muri_gate:1", "site=x muri:model=a muri-gate:licence"),
        line(2, "PENDING", 0, "JobHeldAdmin", "muri_gate:1", "muri:model=a muri-gate:licence"),
        line(3, "PENDING", 0, "JobHeldUser", "(null)", "muri:on"),
        line(4, "RUNNING", 1, "None", "(null)", "muri-host:f00d:1,2"),
        line(5, "RUNNING", 1, "None", "(null)", "of another tool"),
        line(6, "PENDING", 1, "Dependency", "(null)", "of another tool\nmuri:on 7           PENDING muri:"),
        line("x", "PENDING", 1, "None", "(null)", "muri:on"),
        "\udce9 \x1b[31m muri:on",
        "",
    ]
)


def test_tagged_jobs_are_read_and_nothing_else():
    commands = Commands(LINES)
    jobs = {job.job_id: read_job(job) for job in read_tagged_jobs(commands).jobs}
    assert sorted(jobs) == [1, 2, 3, 4]
    assert [jobs[n].role for n in (1, 2, 3, 4)] == [Role.CANDIDATE, Role.USER_HELD, Role.CANDIDATE, Role.PILOT]
    assert jobs[1].licenses == "matlab:1,muri_gate:1"
    assert jobs[4].state is JobState.RUNNING
    form = commands.asked[-1].lower()
    assert not any(text in form for text in ("name", "command", "workdir", "std"))
