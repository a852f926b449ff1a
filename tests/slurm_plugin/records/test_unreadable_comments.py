"""A comment that cannot be read costs its job no more than being planned: nothing stays behind the gate for ever."""

import pytest
from fake_slurm import NOW_S, FakeSlurm, behind_licence, make_job, make_node, one_cycle

from muri.slurm_plugin.execute.drain import drain
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records import roles
from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.roles import Role, read_job, view_of

STATE = tags.format_state(tags.MemberState(9, tags.Original("gres/gpu:1", "", 4, 4, 0, 3600)))


def raise_on(monkeypatch, reader: str, word: str) -> None:
    """Make a reader of comments fail on those that hold a word."""
    real = getattr(roles, reader)

    def read(comment: str):
        if word in comment:
            raise ZeroDivisionError(comment)
        return real(comment)

    monkeypatch.setattr(roles, reader, read)


def only(job: Job):
    return view_of(FakeSlurm([job], [make_node("n1")]).snapshot()).jobs[job.job_id]


def gated(kind: str, **changes) -> Job:
    job = make_job(1, **changes)
    if kind == "licence":
        return behind_licence(job)
    return make_job(1, **{**changes, "admin_comment": f"{job.admin_comment} muri-gate:hold"})


@pytest.fixture
def damaged(monkeypatch) -> None:
    """AdminComments that hold the word odd cannot be read."""
    raise_on(monkeypatch, "parse_request", "odd")


@pytest.mark.usefixtures("damaged")
@pytest.mark.parametrize("kind", ["licence", "hold"])
@pytest.mark.parametrize("leave", ["cycle", "drain"])
def test_a_job_whose_admin_comment_cannot_be_read_is_left_to_slurm(make_controller, kind, leave):
    nodes = [make_node("n1", usable=False)]
    slurm = FakeSlurm([gated(kind, admin_comment="muri:on odd")], nodes, gate_license=kind == "licence")
    slurm.extend_lease(NOW_S + 600) if kind == "licence" else None
    assert only(slurm.jobs[1]).role is Role.NOT_OURS
    if leave == "cycle":
        one_cycle(make_controller, slurm, gate=kind)
    else:
        drain(slurm, slurm.read_now)
    assert (slurm.jobs[1].held, slurm.jobs[1].licenses) == (False, "")


@pytest.mark.usefixtures("damaged")
@pytest.mark.parametrize("kind", ["licence", "hold"])
def test_whose_hold_it_is_still_counts(kind):
    job = only(gated(kind, admin_comment="muri:on odd", held=True, reason="JobHeldAdmin"))
    if kind == "hold":
        assert (job.role, job.held_by_others, job.gate, job.gated) == (Role.OTHER, True, "hold", False)
    else:
        assert (job.role, job.gate, job.gated) == (Role.NOT_OURS, "licence", True)


@pytest.mark.usefixtures("damaged")
@pytest.mark.parametrize(
    "changes",
    [
        {"admin_comment": "odd"},
        {"admin_comment": "muri:on odd", "held": False, "state": JobState.RUNNING, "nodes": "n1"},
    ],
)
def test_a_job_that_is_not_muris_is_none_of_its_business(changes):
    assert only(make_job(1, **changes)).role is Role.OTHER


@pytest.mark.parametrize(
    ("comment", "role"), [("muri:on", Role.CANDIDATE), (f"muri:on muri-state:{STATE}", Role.MEMBER)]
)
def test_without_its_users_comment_a_job_is_what_it_was(monkeypatch, comment, role):
    raise_on(monkeypatch, "read_reports", "odd")
    job = behind_licence(make_job(1, admin_comment=comment, comment="odd"))
    found = only(job)
    assert (found.role, found.gated) == (role, True)
    assert found.membership == tags.parse_state(comment)


def test_a_number_of_thousands_of_digits_is_no_job():
    fault = tags.format_json({"cause": "x", "culprits": ["9" * 5000, "3"]})
    job = read_job(make_job(1, comment=f"muri-fault:{fault}"))
    assert job.reports.fault is not None
    assert job.reports.fault.culprits == (3,)


@pytest.mark.parametrize(("length", "kept"), [(10, True), (1_900, True), (3_000, False)])
def test_what_is_kept_of_records_is_bounded_however_much_users_write(length, kept):
    first, again = (make_job(1, comment="x" * length, priority=7) for _ in range(2))
    assert (read_job(first) is read_job(again)) is kept
    assert read_job(make_job(1, comment="x" * length, priority=8)).priority == 8
