"""Roles and models of jobs; a job whose comment cannot be read is left to Slurm at worst."""

from dataclasses import replace

import pytest
from fake_slurm import NOW_S, FakeSlurm, behind_license, make_job, make_node, one_cycle

from muri.slurm_plugin.execute.gate import drain
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records import roles
from muri.slurm_plugin.records.cluster import Job, JobState, NodeIndex
from muri.slurm_plugin.records.roles import Role, profile_key, read_job, view_of

STATE = tags.format_state(tags.MemberState(9, tags.Original("gres/gpu:1", "", 4, 4, 0, 3600)))


def raise_on(monkeypatch, module, reader: str, word: str) -> None:
    """Make a reader of comments fail on those that hold a word."""
    real = getattr(module, reader)

    def read(comment: str):
        if word in comment:
            raise ZeroDivisionError(comment)
        return real(comment)

    monkeypatch.setattr(module, reader, read)


def only(job: Job):
    return view_of(FakeSlurm([job], [make_node("n1")]).snapshot()).jobs[job.job_id]


def gated(kind: str, **changes) -> Job:
    job = make_job(1, **changes)
    return (
        behind_license(job) if kind == "license" else replace(job, admin_comment=f"{job.admin_comment} muri-gate:hold")
    )


@pytest.fixture
def damaged(monkeypatch) -> None:
    """AdminComments that hold the word odd cannot be read."""
    raise_on(monkeypatch, tags, "parse_request", "odd")


@pytest.mark.usefixtures("damaged")
@pytest.mark.parametrize("kind", ["license", "hold"])
@pytest.mark.parametrize("leave", ["cycle", "drain"])
def test_a_job_whose_admin_comment_cannot_be_read_is_left_to_slurm(make_controller, kind, leave):
    nodes = [make_node("n1", usable=False)]
    slurm = FakeSlurm([gated(kind, admin_comment="muri:on odd")], nodes, gate_license=kind == "license")
    slurm.extend_lease(NOW_S + 600) if kind == "license" else None
    assert only(slurm.jobs[1]).role is Role.NOT_OURS
    if leave == "cycle":
        one_cycle(make_controller, slurm, gate=kind)
    else:
        drain(slurm, slurm.tagged)
    assert (slurm.jobs[1].held, slurm.jobs[1].licenses) == (False, "")


@pytest.mark.usefixtures("damaged")
@pytest.mark.parametrize("kind", ["license", "hold"])
def test_whose_hold_it_is_still_counts(kind):
    job = only(gated(kind, admin_comment="muri:on odd", held=True, reason="JobHeldAdmin"))
    if kind == "hold":
        assert (job.role, job.held_by_others, job.gate, job.gated) == (Role.OTHER, True, "hold", False)
    else:
        assert (job.role, job.gate, job.gated) == (Role.NOT_OURS, "license", True)


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
    raise_on(monkeypatch, roles, "read_reports", "odd")
    job = behind_license(make_job(1, admin_comment=comment, comment="odd"))
    found = only(job)
    assert (found.role, found.gated) == (role, True)
    assert found.membership == tags.parse_state(comment)


@pytest.mark.parametrize(("length", "kept"), [(10, True), (1_900, True), (3_000, False)])
def test_what_is_kept_of_records_is_bounded_however_much_users_write(length, kept):
    first, again = (make_job(1, comment="x" * length, priority=7) for _ in range(2))
    assert (read_job(first) is read_job(again)) is kept
    assert read_job(make_job(1, comment="x" * length, priority=8)).priority == 8


UNNAMED = "muri:on muri-script:0123456789abcdef"


def key(**changes):
    job = read_job(make_job(1, **({"admin_comment": UNNAMED} | changes)))
    return profile_key(job, NodeIndex((make_node("n1"),)))


@pytest.mark.parametrize(
    "changes",
    [
        {"admin_comment": "muri:on muri-script:fedcba9876543210"},
        {"submit_line": "sbatch train.sh 6"},
        {"work_dir": "/home/alice/other"},
        {"user": "bob"},
        {"admin_comment": "muri:batch-size=8 muri-script:0123456789abcdef"},
        {"gpu_count": 2},
    ],
)
def test_without_a_name_script_arguments_place_and_user_tell_models_apart(changes):
    assert key() == key(name="another job name")
    assert key(**changes) != key()


def test_models_of_one_name_of_two_users_are_two():
    alices, bobs = (key(admin_comment="muri:model=resnet18,batch-size=8", user=user) for user in ("alice", "bob"))
    assert (alices.user, bobs.user) == ("alice", "bob")
    assert alices.published == bobs.published
    assert len({str(alices), str(bobs), str(alices.published)}) == 3


@pytest.mark.parametrize("field", ["work_dir", "submit_line"])
def test_a_name_in_latin_1_makes_a_key_that_can_be_stored(field):
    model = key(**{field: "/home/bob/caf\udce9"}).model
    assert model.encode("utf-8")
    assert r"caf\udce9" in model
    assert key(**facts(words="_wA")).model.encode("utf-8")


def facts(line: str = "0" * 16, words: str = "YQA") -> dict[str, str]:
    return {"admin_comment": f"{UNNAMED} muri-facts:1.{'e' * 16}.{line}..{words}", "submit_line": ""}


NAMED = {"admin_comment": "muri:model=resnet18,batch-size=8"}
TOLD = f"alice:/home/alice:/home/alice/train.sh a@{'0' * 16}#0123456789abcdef"


@pytest.mark.parametrize(
    ("changes", "model"),
    [
        pytest.param(NAMED, "resnet18", id="a name is enough"),
        pytest.param({**NAMED, "submit_line": "sbatch other.sh"}, "resnet18", id="whatever the line"),
        pytest.param({"admin_comment": "muri:on"}, "alice:/home/alice:sbatch train.sh 5", id="scripts not looked at"),
        pytest.param(facts(), TOLD, id="words and digest of the facts"),
        pytest.param({**facts(), "submit_line": "sbatch train.sh a"}, TOLD, id="the same on every release"),
        pytest.param(facts("1" * 16), TOLD.replace("0" * 16, "1" * 16), id="another digest"),
        pytest.param(facts(words="~"), TOLD.replace(" a@", "@"), id="words that did not fit"),
    ],
)
def test_a_model_is_named_by_its_user_or_by_its_submission(changes, model):
    assert key(**changes).model == model
