"""The GPU benchmark's jobs on the CPU in a tiny size, and what it says without a GPU."""

import sys
from pathlib import Path

import pytest
import torch
from launcher_harness import Launcher, ends

from benchmarks import interleaving_gpu

ROOT = Path(__file__).parents[3]


def benchmark(launcher: Launcher, *options: str) -> int:
    """The benchmark's exit code."""
    out, err = launcher.path(None, "out").open("wb"), launcher.path(None, "err").open("wb")
    command = [sys.executable, "-m", "benchmarks.interleaving_gpu", *options]
    return ends(launcher.spawn(command, launcher.environment, stdout=out, stderr=err, cwd=ROOT))


def test_jobs_train_on_the_cpu(launcher: Launcher) -> None:
    assert benchmark(launcher, "--smoke") == 0, launcher.err(None)
    iterations = interleaving_gpu.SMOKE_ITERATIONS
    assert launcher.out(None) == f"{', '.join(interleaving_gpu.JOBS)}: {iterations} iterations each on the CPU\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_what_to_do(launcher: Launcher) -> None:
    assert benchmark(launcher, "--json") == 1
    assert launcher.out(None) == ""
    said = launcher.err(None)
    assert "finds no GPU" in said
    assert "--smoke" in said
    assert "Traceback" not in said


def test_peak_memory_of_all_jobs_over_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "mib"
    monkeypatch.setattr(interleaving_gpu, "MEMORY_QUERY", ("cat", str(said)))
    memory = interleaving_gpu.GpuMemory()
    for name, mib in [
        ("resnet18", 2000),
        ("gpt2", 8000),
        ("a2c", 500),
        ("vgg16", 4000),
        ("fair", 8800),
        ("gpt2", 7000),
    ]:
        said.write_text(f"{mib}\n")
        with memory.watching(name):
            pass
    assert memory.peak_mib["gpt2"] == 8000
    assert memory.growth() == pytest.approx({"fair": 0.1})


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
