"""Details that only scontrol shows: each job is asked for once, and a user's text speaks for no other user's job."""

import pytest

from muri.slurm_plugin.gateway import queue_reader
from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError, SlurmUnreachableError, TooLongAnswerError
from muri.slurm_plugin.gateway.queue_reader import DetailsReader
from muri.slurm_plugin.gateway.text_fields import details_of

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
    told = details_of(PLAIN.format(1).replace("Command=/x", "Command=/x SpreadJob=No SpreadJob=Yes"))
    assert told.flags == ("SPREAD_JOB",)


def test_an_answer_that_is_too_long_costs_the_jobs_that_make_it_so() -> None:
    slurm = Scontrol(*many(30))

    def show(job_id: int) -> bytes:
        if job_id in (0, 7):
            raise TooLongAnswerError("too long")
        return slurm(job_id)

    assert set(DetailsReader(show).read(dict.fromkeys(range(1, 31)))) == set(range(1, 31)) - {7}


def test_a_job_that_is_gone_has_no_details_and_is_no_error() -> None:
    assert DetailsReader(Scontrol(*many(2))).read({9: None}) == {}


@pytest.mark.parametrize("error", [SlurmUnreachableError("away"), GatewayError("refused")])
def test_only_a_slurmctld_that_does_not_answer_ends_the_reading(error: GatewayError) -> None:
    def show(_job_id: int) -> bytes:
        raise error

    if isinstance(error, SlurmUnreachableError):
        with pytest.raises(SlurmUnreachableError):
            DetailsReader(show).read({1: None})
    else:
        assert DetailsReader(show).read({1: None}) == {}


def test_a_submit_line_is_read_to_its_end() -> None:
    text = "JobId=1 Command=(null) SubmitLine=sbatch a b=c\n d WorkDir=/home/alice AdminComment=x\n"
    assert details_of(text).submit_line == "sbatch a b=c\n d"


def test_an_arrays_limit_is_told_by_its_own_record() -> None:
    told = details_of("JobId=20 ArrayJobId=20 ArrayTaskId=0-5 ArrayTaskThrottle=2 JobName=a ArrayTaskThrottle=9 \n")
    assert told.array_limit == 2
    assert details_of(PLAIN.format(1)).array_limit == 0
