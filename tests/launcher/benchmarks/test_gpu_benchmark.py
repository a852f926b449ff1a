"""The GPU benchmark's jobs on the CPU in a tiny size, and what it says without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import interleaving_gpu

ROOT = Path(__file__).parents[3]


def test_jobs_train_on_the_cpu() -> None:
    assert interleaving_gpu.smoke() == interleaving_gpu.SMOKE_ITERATIONS * len(interleaving_gpu.JOBS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_what_to_do() -> None:
    command = [sys.executable, "-m", "benchmarks.interleaving_gpu", "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "finds no GPU" in done.stderr
    assert "--smoke" in done.stderr
    assert "Traceback" not in done.stderr


def test_full_size_models_have_the_published_number_of_parameters() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks" / "gpu_jobs"))
    try:
        import models
    finally:
        sys.path.pop(0)
    with torch.device("meta"):
        counts = {
            "resnet18": sum(p.numel() for p in models.resnet18(tiny=False).parameters()),
            "vgg16": sum(p.numel() for p in models.vgg16(tiny=False).parameters()),
            "gpt2": sum(p.numel() for p in models.Gpt2(tiny=False).parameters()),
        }
    assert counts == {"resnet18": 11_689_512, "vgg16": 138_357_544, "gpt2": 124_439_808}
