"""What a drain reads: ids, states and tags, whatever else stands in the queue."""

from muri.slurm_plugin.gateway.base import NoSuchJobError
from muri.slurm_plugin.gateway.queue_reader import read_tagged_jobs
from muri.slurm_plugin.gateway.slurm_commands import LinesWith
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.roles import Role, read_job


class Commands:
    def __init__(self, text: str) -> None:
        self.text = text
        self.asked: list[str] = []

    def lines(self, action: str, arguments: list[str], word: bytes, longest: int) -> list[bytes]:
        self.asked += arguments
        found = LinesWith(word, longest)
        found.take(self.text.encode("utf-8", "surrogateescape"))
        return found.lines()


def line(
    job_id: object, state: str, priority: int, reason: str, licenses: str, comment: str, waits: str = "(null)"
) -> str:
    return (
        f"{job_id:<12}{job_id:<12}{state:<16}{priority:<22}{reason:<48}{'N/A':<64}{licenses:<512}{-3:<12}{waits:<2048}"
        f"{1001:<12}{1002:<12}{comment:<16384}"
    )


def task_line(job_id: int, tasks: str) -> str:
    """A line of array 10."""
    plain = line(job_id, "PENDING", 1, "Licenses", "muri_gate:1", "muri:on muri-gate:licence")
    return f"{plain[:12]}{10:<12}{plain[24:110]}{tasks:<64}{plain[174:]}"


LINES = "\n".join(
    [
        line(1, "PENDING", 4711, "Licenses", "matlab:1,muri_gate:1", "site=x muri:model=a muri-gate:licence"),
        line(2, "PENDING", 0, "JobHeldAdmin", "muri_gate:1", "muri:model=a muri-gate:licence"),
        line(3, "PENDING", 0, "JobHeldUser", "(null)", "muri:on", "after:9_2(unfulfilled)"),
        line(4, "RUNNING", 1, "None", "(null)", "muri-pilot:f00d:1,2"),
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
    assert [(jobs[n].nice, jobs[n].dependency) for n in (1, 3)] == [(-3, ""), (-3, "after:9_2")]
    assert jobs[4].state is JobState.RUNNING
    assert {(job.uid, job.gid) for job in jobs.values()} == {(1001, 1002)}
    form = commands.asked[-1].lower()
    assert not any(text in form for text in ("name", "command", "workdir", "std"))


def test_records_of_an_array_are_told_apart():
    text = "\n".join([task_line(10, "4-9,12%3"), task_line(11, "3"), ""])
    jobs = {job.job_id: job for job in read_tagged_jobs(Commands(text)).jobs}
    assert {job_id: job.name_in_slurm for job_id, job in jobs.items()} == {10: "10_[4-9,12]", 11: "10_3"}
    assert read_job(jobs[11]).role is Role.CANDIDATE


LONG = ",".join(f"site{n}:1" for n in range(100)) + ",muri_gate:1"


class Squeue:
    """squeue, which cuts off fields that are longer than their widths."""

    def __init__(self, jobs: dict[int, tuple[str, str]]) -> None:
        self.jobs = jobs
        self.asked: list[list[str]] = []

    def lines(self, action: str, arguments: list[str], word: bytes, longest: int) -> list[bytes]:
        self.asked.append(arguments)
        form = next(each.removeprefix("--Format=") for each in arguments if each.startswith("--Format="))
        widths = {name: int(width) for name, width in (field.split(":") for field in form.split(","))}
        chosen = [each.removeprefix("--jobs=").split(",") for each in arguments if each.startswith("--jobs=")]
        known = {job_id: texts for job_id, texts in self.jobs.items() if not chosen or str(job_id) in chosen[0]}
        if not known:
            raise NoSuchJobError("Invalid job id specified")
        found = LinesWith(word, longest)
        for job_id, (licenses, comment) in known.items():
            number, uid = str(job_id), "1001"
            values = (number, number, "PENDING", "4711", "Licenses", "N/A", licenses, "0", "(null)", uid, uid, comment)
            cut = "".join(v[:width].ljust(width) for v, width in zip(values, widths.values(), strict=True))
            found.take(cut.encode() + b"\n")
        return found.lines()


def test_licences_that_squeue_cuts_off_are_read_whole():
    squeue = Squeue({1: (LONG, "muri:on muri-gate:licence"), 2: ("matlab:1", "muri:on"), 3: (LONG, "another's")})
    jobs = {job.job_id: job for job in read_tagged_jobs(squeue).jobs}
    assert {job_id: job.licenses for job_id, job in jobs.items()} == {1: LONG, 2: "matlab:1"}
    assert [each for words in squeue.asked for each in words if each.startswith("--jobs")] == ["--jobs=1"]


def test_tags_that_squeue_cuts_off_are_read_whole():
    comment = "muri:on " + "site " * 4000 + "muri-gate:licence"
    (job,) = read_tagged_jobs(Squeue({1: ("muri_gate:1", comment)})).jobs
    assert job.admin_comment == comment


def test_a_field_without_an_end_leaves_its_job_out(caplog):
    squeue = Squeue({1: ("x:1," * 20_000, "muri:on"), 2: ("matlab:1", "muri:on")})
    assert [job.job_id for job in read_tagged_jobs(squeue).jobs] == [2]
    assert "[1]" in caplog.text


def test_many_jobs_with_long_licences_are_asked_for_in_parts():
    squeue = Squeue(dict.fromkeys(range(1, 1202), (LONG, "muri:on")))
    assert len(read_tagged_jobs(squeue).jobs) == 1201
    assert len(squeue.asked) == 4


def test_a_job_that_has_gone_meanwhile_is_none():
    squeue = Squeue({1: (LONG, "muri:on")})
    whole = squeue.lines

    def lines(*arguments):
        found = whole(*arguments)
        squeue.jobs = {}
        return found

    squeue.lines = lines
    assert read_tagged_jobs(squeue).jobs == ()
