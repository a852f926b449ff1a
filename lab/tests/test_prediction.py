"""Predictions from features: what is learned, from how much, and what `muri-lab predict --module` says."""

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from profile_builders import make_profile

from muri.commands import run_command
from muri.profiler.estimates import FEATURES
from muri.profiler.records import Document, ProfileKey
from muri.profiler.store import ProfileStore
from muri_lab.cli import cli
from muri_lab.interference.fits import best_known
from muri_lab.prediction import predictor
from muri_lab.prediction.features import Example, GraphFeatures, all_features, estimate_memory, examples, put_features
from muri_lab.prediction.predictor import (
    ITERATION,
    LEAST_FAMILIES,
    LEAST_PROFILES,
    SHARES,
    Constant,
    LearnerMissingError,
    TooFewProfilesError,
    check_enough,
    fit_all,
    folds,
    held_out,
    predict,
    prediction_of,
    trees,
    vectors,
)

GPU = "a100"
BATCHES = (4, 16, 64)
FAMILIES = 8


@pytest.fixture(scope="module", autouse=True)
def few_trees():
    """A quick learner: the tests need no accuracy, but for one of them, which asks for the product's own."""

    def quick():
        return trees().set_params(n_estimators=25, learning_rate=0.2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictor, "trees", quick)
        fit_all.cache_clear()
        yield
    fit_all.cache_clear()


def predicted_profile(store, key):
    found = prediction_of(store, key)
    return None if found is None else found.profile(key)


def lawful(family, size, batch_size, gpu_type=GPU):
    """A model whose GPU time follows its FLOPs and whose reading follows its batch."""
    flops = 10**9 * batch_size * (1 + family) * size**2
    features = GraphFeatures(
        batch_size=batch_size,
        input_elements=3072,
        input_bytes=batch_size * 12288,
        parameters=10**6 * size,
        parameter_bytes=4 * 10**6 * size,
        gradient_bytes=4 * 10**6 * size,
        activation_bytes=flops // 100,
        working_bytes=flops // 200,
        forward_flops=flops // 3,
        training_flops=flops,
        kernels=40 * size,
        moved_bytes=flops // 20,
        convolutions=10 * size,
        depth=10 * size,
    )
    load_s, preprocess_s, propagate_s = 1e-4 * batch_size, 2e-4 * batch_size, flops / 1e13
    measured = make_profile(
        f"family{family}/{size}",
        batch_size=batch_size,
        gpu_type=gpu_type,
        load_s=load_s,
        preprocess_s=preprocess_s,
        propagate_s=propagate_s,
        synchronize_s=0.0,
        iteration_s=load_s + preprocess_s + propagate_s,
    )
    return Example(features, measured)


def zoo(families=FAMILIES, gpu_type=GPU):
    return [
        lawful(family, size, batch_size, gpu_type)
        for family in range(families)
        for size in (1, 2)
        for batch_size in BATCHES
    ]


def fill(path, found):
    with ProfileStore(path) as store:
        store.put_all(item.profile for item in found)
        for item in found:
            put_features(store, item.profile.key, item.features)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("store") / "profiles.db", zoo())


@pytest.fixture
def store(path):
    with ProfileStore(path, read_only=True) as opened:
        yield opened


class TestDocuments:
    def test_only_published_measured_profiles_of_the_same_gpus_are_learned_from(self, tmp_path):
        other, estimated, alices = lawful(0, 1, 4, "v100"), lawful(1, 1, 4), lawful(3, 1, 4)
        estimated = estimated._replace(profile=replace(estimated.profile, source="scaled"))
        alices = alices._replace(profile=replace(alices.profile, key=replace(alices.profile.key, user="alice")))
        fill(tmp_path / "p.db", [lawful(2, 1, 4), other, estimated, alices])
        with ProfileStore(tmp_path / "p.db") as store:
            store.put(make_profile("no features", gpu_type=GPU))
            assert [item.profile.key.model for item in examples(store, GPU)] == ["family2/1"]
            assert examples(store, GPU, gpu_count=2) == ()

    def test_a_document_that_is_none_of_ours(self, tmp_path, caplog):
        with ProfileStore(tmp_path / "p.db") as store:
            store.put_document(FEATURES, Document("strange", "", {"key": {"model": "m"}}))
            assert all_features(store) == ()
        assert re.search(r"stored for strange are incomplete.*batch_size", caplog.text)


class TestRegression:
    def test_what_follows_from_the_features_is_predicted_better_than_by_the_mean(self, store):
        found = examples(store, GPU)
        outputs, fold = ITERATION.learned(found), folds(found, len(found))
        errors = [
            float(np.sqrt(np.mean((held_out(make, vectors(found), outputs, fold) - outputs) ** 2)))
            for make in (trees, Constant)
        ]
        assert errors[0] < errors[1] / 2

    def test_a_family_is_never_in_two_folds(self, store):
        found = examples(store, GPU)
        of = {}
        for item, fold in zip(found, folds(found), strict=True):
            of.setdefault(item.family, set()).add(fold)
        assert len(of) == FAMILIES
        assert all(len(of_family) == 1 for of_family in of.values())

    def test_shares_are_shares_and_intervals_hold_the_value(self, store):
        found = predict(lawful(5, 2, 32).features, examples(store, GPU))
        assert sum(share.value for share in found.shares) <= 1 + 1e-9
        for figure in (found.utilization, *found.shares, found.iteration_s):
            assert 0 <= figure.low <= figure.value <= figure.high
        assert all(share.high <= 1 for share in found.shares)
        assert found.shares[3] == (0, 0, 0)  # one GPU: no profile has a synchronize
        assert found.shares[2].low < SHARES[2].of(lawful(5, 2, 32)) < found.shares[2].high

    def test_memory_has_the_range_of_what_was_measured(self):
        asked, known = lawful(5, 2, 32).features, zoo()
        formula = estimate_memory(asked).allocated_gib

        def measured(factor):
            needed = [factor * estimate_memory(item.features).allocated_gib for item in known]
            profiles = [replace(item.profile, gpu_mem_gib=gib) for item, gib in zip(known, needed, strict=True)]
            return [item._replace(profile=profile) for item, profile in zip(known, profiles, strict=True)]

        assert predict(asked, measured(1.5)).allocated_gib == pytest.approx((formula, formula, 1.5 * formula))
        assert predict(asked, measured(0)).allocated_gib is None

    def test_without_scikit_learn(self, store, monkeypatch):
        fit_all.cache_clear()
        monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
        with pytest.raises(LearnerMissingError, match=r"pip install \./lab"):
            predict(lawful(0, 1, 4).features, examples(store, GPU))
        assert predicted_profile(store, ProfileKey("family3/1", 8, 1, GPU)) is None


class TestPredictProfile:
    def test_another_batch_size_of_a_known_model(self, store):
        key = ProfileKey("family3/1", 32, 1, GPU)
        found = predicted_profile(store, key)
        truth = lawful(3, 1, 32).profile
        assert (found.key, found.source, found.is_estimate) == (key, "predicted", True)
        assert sum(found.stage_s) <= found.iteration_s * (1 + 1e-9)
        assert found.iteration_s == pytest.approx(truth.iteration_s, rel=0.5)
        assert found.bottleneck == truth.bottleneck
        assert found.gpu_mem_gib > 0
        assert found.detail.gradient_mib == pytest.approx(4e6 / 2**20)
        assert best_known(store, key) == found

    def test_what_nothing_is_known_of(self, store):
        for key in (
            ("nobody", 8, 1, GPU),
            ("family3/1", 0, 1, GPU),
            ("family3/1", 8, 1, "v100"),
            ("family3/1", 8, 2, GPU),
        ):
            assert predicted_profile(store, ProfileKey(*key)) is None, key

    def test_too_few(self, tmp_path):
        fill(tmp_path / "p.db", zoo(families=3))
        with ProfileStore(tmp_path / "p.db") as store:
            assert predicted_profile(store, ProfileKey("family1/1", 8, 1, GPU)) is None
            with pytest.raises(TooFewProfilesError, match=f"18 .*of 3 model .*; {LEAST_PROFILES} of {LEAST_FAMILIES}"):
                check_enough(store, GPU)
            with pytest.raises(TooFewProfilesError, match=f"The store has some of: 1 × {GPU}"):
                check_enough(store, "v100")

    def test_nodes_without_gpu_need_no_gpu_memory(self, tmp_path):
        fill(tmp_path / "p.db", zoo(gpu_type="cpu"))
        with ProfileStore(tmp_path / "p.db") as store:
            found = predicted_profile(store, ProfileKey("family1/1", 8, 1, "cpu"))
        assert (found.gpu_mem_gib, found.detail.gpu_utilization) == (0.0, None)


MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 10))

def words():
    return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 4))

def looks_at_weights():
    layer = nn.Linear(48, 10)
    assert layer.weight.sum().item() == layer.weight.sum().item()
    return nn.Sequential(nn.Flatten(), layer)

def broken():
    raise ValueError("no such size")

def leaves():
    raise SystemExit(0)
"""


@pytest.fixture
def model(tmp_path):
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    return file


class TestCommand:
    def run(self, path, target, *more, shape="3x4x4", gpu_type=GPU):
        arguments = ["predict", "--module", str(target), "--input", shape, "--batch-size", "8", "--store", str(path)]
        return CliRunner().invoke(cli, [*arguments, "--gpu-type", gpu_type, *more], catch_exceptions=False)

    def test_json(self, path, model):
        document = json.loads(self.run(path, f"{model}:build", "--json").stdout)
        assert document["features"]["parameters"] == 490
        assert document["learned_from"] == {"profiles": len(zoo()), "families": FAMILIES}
        assert set(document["predicted"]) >= {"device_utilization", "propagate_share", "iteration_s"}
        memory = document["memory_gib"]
        assert memory["total"] == pytest.approx(memory["allocated"] + memory["framework"])

    def test_token_ids_and_a_factory_that_looks_at_its_weights(self, path, model):
        document = json.loads(self.run(path, f"{model}:words", "--json", shape="int:12").stdout)
        assert document["features"]["embeddings"] == 1
        assert self.run(path, f"{model}:looks_at_weights").exit_code == 0

    @pytest.mark.parametrize(
        ("target", "shape", "reason"),
        [
            ("{folder}/model.py", "3x4x4", "give a file and a function in it"),
            ("{folder}/absent.py:build", "3x4x4", "there is no file {folder}/absent.py"),
            ("{folder}/model.py:absent", "3x4x4", "absent is not defined there"),
            ("{folder}/model.py:broken", "3x4x4", "broken failed: ValueError: no such size"),
            ("{folder}/model.py:leaves", "3x4x4", "leaves failed: SystemExit: 0"),
            ("{folder}/typo.py:build", "3x4x4", "typo.py cannot be loaded: SyntaxError"),
            ("{folder}/model.py:build", "3x0x4", "--input '3x0x4': give the shape of one sample"),
            ("{folder}/model.py:build", "3x5x5", "fails for these inputs"),
        ],
    )
    def test_a_users_mistake(self, path, model, capsys, target, shape, reason):
        (model.parent / "typo.py").write_text("def build(:")
        arguments = ["predict", f"--module={target.format(folder=model.parent)}", "--input", shape]
        code = run_command(cli, [*arguments, "--batch-size", "8", "--gpu-type", GPU, "--store", str(path)])
        assert code == 2
        assert reason.format(folder=model.parent) in capsys.readouterr().err

    def test_kept_features_serve_other_batch_sizes(self, tmp_path, model):
        path = fill(tmp_path / "p.db", zoo())
        done = self.run(path, f"{model}:build", "--keep-as", "mine")
        assert (done.exit_code, done.stderr) == (0, "kept the features of mine\n")
        with ProfileStore(path, read_only=True) as store:
            assert predicted_profile(store, ProfileKey("mine", 32, 1, GPU)).source == "predicted"


def test_the_cache_keeps_what_was_learned(store, monkeypatch):
    known = examples(store, GPU)
    first = fit_all(known)
    monkeypatch.setattr(predictor, "trees", lambda: pytest.fail("learned again"))
    assert fit_all(examples(store, GPU)) is first
