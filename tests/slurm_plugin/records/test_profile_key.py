"""Which jobs count as the same model."""

import pytest
from fake_slurm import make_job, make_node

from muri.slurm_plugin.records.node_index import NodeIndex
from muri.slurm_plugin.records.roles import profile_key, read_job

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


def test_a_name_is_enough():
    named = {"admin_comment": "muri:model=resnet18,batch-size=8"}
    assert key(**named).model == "resnet18"
    assert key(**named, submit_line="sbatch other.sh") == key(**named)


def test_models_of_one_name_of_two_users_are_two():
    alices, bobs = (key(admin_comment="muri:model=resnet18,batch-size=8", user=user) for user in ("alice", "bob"))
    assert (alices.user, bobs.user) == ("alice", "bob")
    assert alices.published == bobs.published
    assert len({str(alices), str(bobs), str(alices.published)}) == 3


def test_jobs_that_were_submitted_before_scripts_were_looked_at_keep_their_key():
    assert key(admin_comment="muri:on").model == "alice:/home/alice:sbatch train.sh 5"


@pytest.mark.parametrize("field", ["work_dir", "submit_line"])
def test_a_name_in_latin_1_makes_a_key_that_can_be_stored(field):
    model = key(**{field: "/home/bob/caf\udce9"}).model
    assert model.encode("utf-8")
    assert r"caf\udce9" in model


def facts(line: str = "0" * 16, words: str = "YQA") -> dict[str, str]:
    return {"admin_comment": f"{UNNAMED} muri-facts:1.{'e' * 16}.{line}..{words}", "submit_line": ""}


def test_with_facts_the_words_and_the_lines_digest_tell_models_apart():
    assert key(**facts()).model == f"alice:/home/alice:/home/alice/train.sh a@{'0' * 16}#0123456789abcdef"
    assert key(**facts("1" * 16)) != key(**facts())
    assert key(**facts(words="~")).model == f"alice:/home/alice:/home/alice/train.sh@{'0' * 16}#0123456789abcdef"
    assert key(**{**facts(), "submit_line": "sbatch train.sh a"}) == key(**facts())  # on every release the same


def test_words_that_are_not_utf_8_make_a_key_that_can_be_stored():
    assert key(**facts(words="_wA")).model.encode("utf-8")
