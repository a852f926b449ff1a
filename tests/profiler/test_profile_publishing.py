"""Publishing: who finds whose profile, what goes with it, and what taking it back leaves."""

import json
from dataclasses import replace

import pytest
from profile_builders import make_profile, pair
from profile_commands import invoke, muri

from muri.profiler.interference import FITS, by_pair, computation_name, find, known_pairs, put
from muri.profiler.records import Document, ProfileKey
from muri.profiler.sensitivity import SENSITIVITIES, CpuSensitivity, Point, SensitivityProfile
from muri.profiler.store import ACCUMULATES, ProfileStore

ALICES = make_profile(user="alice", load_s=0.11)
BOBS = make_profile(user="bob", load_s=0.33)
PUBLIC = ALICES.key.published
FIT = {"fixed_s": 0.1, "per_unit_s": 0.01, "r_squared": 1.0, "residual_s": 0.0, "points": []}


@pytest.fixture
def path(path):
    with ProfileStore(path) as store:
        store.put_all([ALICES, BOBS])
    return path


def names(path, kind):
    with ProfileStore(path, read_only=True) as store:
        return [document.name for document in store.documents(kind)]


def test_a_profile_is_published_and_taken_back(path, capsys):
    assert muri(capsys, "publish", "resnet18", "--user", "alice", "--yes")[:2] == (0, f"published {ALICES.key}\n")
    with ProfileStore(path) as store:
        assert store.get(PUBLIC) == replace(ALICES, key=PUBLIC)
        assert store.get(BOBS.key) == BOBS
    assert muri(capsys, "publish", "resnet18", "--withdraw", "--yes")[:2] == (0, f"unpublished {PUBLIC}\n")
    with ProfileStore(path) as store:
        assert [item.key.user for item in store.list()] == ["alice", "bob"]
        entries = [(entry.action, entry.key, bool(entry.before), bool(entry.after)) for entry in store.audit()]
    assert entries == [("publish", PUBLIC, False, True), ("withdraw", PUBLIC, True, False)]


def test_whose_is_asked_where_it_is_not_clear(path, capsys):
    code, _, error = muri(capsys, "publish", "resnet18", "--yes")
    assert code == 2
    assert "2 profiles are of 'resnet18'" in error
    assert "--gpu-type gpu --user alice\n" in error
    code, _, error = muri(capsys, "publish", "resnet18", "--all-matching", "--yes")
    assert code == 2
    assert "would be published as the same profile" in error
    with ProfileStore(path) as store:
        assert store.get(PUBLIC) is None


def test_nothing_happens_without_a_yes(path):
    answer = invoke("publish", "resnet18", "--user", "bob", input="n\n")
    assert (answer.exit_code, "Nothing was published." in answer.output) == (1, True)
    assert "resnet18 of bob (batch 64, 1 × gpu)" in answer.output
    with ProfileStore(path) as store:
        assert (store.get(PUBLIC), store.audit()) == (None, ())


def test_several_models_at_once(path, capsys):
    with ProfileStore(path) as store:
        store.put_all([make_profile("bert", user="alice"), make_profile("bert", user="alice", gpu_count=2)])
    code, output, _ = muri(capsys, "publish", "resnet18", "bert", "--user", "alice", "--all-matching", "--yes")
    assert (code, [line.partition(",")[0] for line in output.splitlines()]) == (
        0, ["published resnet18 of alice (batch 64", *["published bert of alice (batch 64"] * 2]
    )  # fmt: skip
    code, output, _ = muri(capsys, "publish", "bert", "--withdraw", "--all-matching", "--yes")
    assert (code, output.count("unpublished bert")) == (0, 2)


def test_what_is_known_of_a_model_goes_with_it(path, capsys):
    cpu = CpuSensitivity((Point(1, 1.0), Point(4, 3.0)), 4, 0, 2)
    with ProfileStore(path) as store:
        for user in ("alice", "bob"):
            key = replace(ALICES.key, user=user)
            store.put_document(SENSITIVITIES, SensitivityProfile(key.name, "", cpu).to_document())
            store.put_document(FITS, Document(computation_name(key), "", {**FIT, "unit": "sample"}))
            store.put_document(ACCUMULATES, Document(str(key), "", {}))
    muri(capsys, "publish", "resnet18", "--user", "alice", "--yes")
    assert names(path, SENSITIVITIES) == ["resnet18", "resnet18 of alice", "resnet18 of bob"]
    assert names(path, FITS)[0] == "resnet18 (1 × gpu)"
    assert names(path, ACCUMULATES)[0] == str(PUBLIC)
    with ProfileStore(path) as store:
        published = {item.name: SensitivityProfile.from_document(item) for item in store.documents(SENSITIVITIES)}
    assert published["resnet18"].cpu == cpu
    muri(capsys, "publish", "resnet18", "--withdraw", "--yes")
    for kind in (SENSITIVITIES, FITS, ACCUMULATES):
        assert len(names(path, kind)) == 2
        assert all(" of " in name for name in names(path, kind))


def test_what_was_measured_for_all_stays_when_a_profile_is_taken_back(path, capsys):
    cpu = CpuSensitivity((Point(1, 1.0), Point(4, 3.0)), 4, 0, 2)
    with ProfileStore(path) as store:
        store.put_document(SENSITIVITIES, SensitivityProfile("resnet18", "", cpu).to_document())
    muri(capsys, "publish", "resnet18", "--user", "alice", "--yes")
    muri(capsys, "publish", "resnet18", "--withdraw", "--yes")
    assert names(path, SENSITIVITIES) == ["resnet18"]


def test_a_script_that_cannot_be_split_takes_the_mark_off_the_published_profile(path, capsys):
    with ProfileStore(path) as store:
        store.put_document(ACCUMULATES, Document(str(PUBLIC), "", {}))
    muri(capsys, "publish", "resnet18", "--user", "alice", "--yes")
    assert names(path, ACCUMULATES) == []


def test_a_pair_is_published_with_the_second_of_its_models(path, capsys):
    other = make_profile("bert", user="alice")
    with ProfileStore(path) as store:
        store.put(other)
        put(store, pair(ALICES.key, other.key))
    muri(capsys, "publish", "resnet18", "--user", "alice", "--yes")
    assert len(names(path, "interference")) == 1
    muri(capsys, "publish", "bert", "--user", "alice", "--yes")
    assert len(names(path, "interference")) == 2
    with ProfileStore(path) as store:
        pairs = by_pair(known_pairs(store))
        assert find(pairs, BOBS.key, replace(other.key, user="bob")).a.key == PUBLIC
    muri(capsys, "publish", "bert", "--withdraw", "--yes")
    assert len(names(path, "interference")) == 1


def test_a_pair_of_one_user_says_nothing_to_another():
    other = ProfileKey("bert", 64, 1, "gpu", "alice")
    pairs = by_pair([pair(ALICES.key, other)])
    assert find(pairs, other, ALICES.key).a.key == other
    assert find(pairs, replace(other, user="bob"), BOBS.key) is None
    assert find(pairs, other.published, PUBLIC) is None


def test_the_list_tells_users_apart(path, capsys):
    with ProfileStore(path) as store:
        store.put(make_profile("vgg16"))
    output = muri(capsys, "list")[1]
    assert [line.split()[:2] for line in output.splitlines()[:4]] == [
        ["MODEL", "USER"], ["resnet18", "alice"], ["resnet18", "bob"], ["vgg16", "all"],
    ]  # fmt: skip
    assert max(map(len, output.splitlines())) <= 80
    assert "alice" not in muri(capsys, "list", "--user", "bob")[1]
    found = json.loads(muri(capsys, "list", "--user", "all", "--json")[1])["profiles"]
    assert [(item["model"], item["user"]) for item in found] == [("vgg16", "")]


def test_who_may_not_change_the_store_sees_his_own_profiles_and_published_ones(path):
    with ProfileStore(path) as store:
        store.put(make_profile("vgg16"))
    with ProfileStore(path, read_only=True, viewer="bob") as store:
        assert [item.key.user for item in store.list()] == ["bob", ""]
        assert store.get(ALICES.key) is None
