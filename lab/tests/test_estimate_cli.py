"""`muri-lab predict` of a known model."""

import json

import pytest
from click.testing import CliRunner
from profile_builders import make_profile
from profile_commands import use_own_store

from muri.profiler.records import ProfileDetail
from muri.profiler.store import ProfileStore
from muri_lab.prediction.command import predict_command

NAMED_LIKE_A_PATH = "ann:/home/ann/runs:sbatch train.sh"


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch):
    path = use_own_store(tmp_path, monkeypatch)
    detail = ProfileDetail(gradient_mib=102.4)
    with ProfileStore(path) as store:
        store.put_all(
            (
                make_profile("resnet18", synchronize_s=0.0, detail=detail),
                make_profile("resnet18", gpu_count=2, synchronize_s=0.02, iteration_s=0.5),
                make_profile("gpt2", batch_size=4, gpu_type="a100", synchronize_s=0.0, detail=detail),
                make_profile(NAMED_LIKE_A_PATH, batch_size=0),
            )
        )
    return path


def predict(*arguments):
    return CliRunner().invoke(predict_command, arguments, catch_exceptions=False).output


def test_an_estimate_says_what_it_rests_on():
    output = predict("gpt2", "--gpus", "4")
    assert "gpt2 (batch 4, 4 × a100): scaled, not measured" in output
    assert "102.4 MiB of gradients" in output
    assert "(ASSUMED)" in output
    assert "MEASURED" not in output
    assert max(len(line) for line in output.splitlines()) <= 80


def test_a_measured_profile_stands_beside_its_estimate():
    output = predict("resnet18", "--gpus", "2")
    lines = {line.split()[0]: line for line in output.splitlines() if line.strip()}
    assert lines["synchronize"].split()[-3:] == ["20.0", "-50", "%"]
    assert lines["load"].split()[-3:] == ["120", "+0", "%"]


def test_an_estimate_as_json():
    document = json.loads(predict("resnet18", "--gpus", "4", "--json"))
    assert document["estimate"]["source"] == "scaled"
    assert document["estimate"]["gpu_count"] == 4
    least, most = document["interval"]["iteration_s"]
    assert least < document["estimate"]["iteration_s"] < most
    assert document["measured"] is None
    assert "the model's own on 2 GPUs" in document["basis"][1]
