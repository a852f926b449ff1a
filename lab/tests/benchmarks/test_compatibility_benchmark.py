"""The comparison of scripts with themselves alone, on scripts made here; it needs no repository."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from warm_start import ONE_THREAD

from muri_lab.benchmarks.compatibility_page import page_of

BENCHMARKS = Path(__file__).parents[3] / "lab" / "muri_lab" / "benchmarks"
pytestmark = pytest.mark.thorough

TRAIN = """
import os, time
print("pid", os.getpid(), "took", time.time(), "s")
print("loss", 0.1 + 0.2)
open("model.txt", "w").write("weights")
"""
GIVEN_AWAY = 'import os; print("a member" if "MURI_GATE" in os.environ else "alone")'


@pytest.fixture
def compatibility(benchmark):
    return benchmark("compatibility")


@pytest.fixture
def observation(benchmark):
    return benchmark("compatibility_observation")


def make_repository(folder: Path, **scripts: str) -> Path:
    repository = folder / "clones" / "someone" / "examples"
    repository.mkdir(parents=True)
    for name, text in scripts.items():
        (repository / f"{name}.py").write_text(text)
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "scripts"]):
        subprocess.run([*git, *words], check=True)
    return folder / "clones"


def test_a_group_gives_what_each_script_gives_alone_and_a_difference_is_found(compatibility, tmp_path: Path) -> None:
    clones = make_repository(tmp_path, train=TRAIN, other=TRAIN, told=GIVEN_AWAY)
    scripts = [
        compatibility.Script(name, "someone/examples", (f"{name}.py",), copies={f"{name}.py": "src/"})
        for name in ("train", "other", "told")
    ]
    place = compatibility.Place(clones, Path(sys.executable), tmp_path / "cache")
    result = compatibility.measure(place, scripts, "process", rounds=1, seed=1, jobs=3, resume=False)
    rows = {row["name"]: row for row in result["scripts"]}
    never = {"process twins": [0, 0], "thread": [0, 0], "thread twins": [0, 0]}
    assert result["counts"] == {"muri run": [3, 3], "process": [2, 3]} | never
    assert rows["train"]["muri_run"] == []
    assert (rows["train"]["files"], rows["train"]["out_repeats"]) == (1, "all")
    (run,) = rows["told"]["process"]
    assert sorted(run["with"]) == ["other", "train"]
    assert run["differences"] == ["out: line 1: 'alone' alone, 'a member' here"]
    page = page_of(result)
    assert "| told | someone/examples |" in page
    assert "- told, process beside" in page
    assert rows["train"]["stage_share"] is rows["train"]["dangers"] is None
    assert "- train: the script ended, no stages marked: it never called" in page
    # Everything is stored: nothing runs again, not even a script that is gone.
    (tmp_path / "cache" / "streams" / "train" / "out").unlink()
    again = compatibility.measure(place, scripts, "process", rounds=1, seed=1, jobs=1, resume=True)
    assert again["scripts"] == result["scripts"]
    assert not (tmp_path / "cache" / "streams" / "train" / "out").exists()


def test_a_script_that_ran_outside_of_its_group_is_no_result(compatibility, benchmark, monkeypatch, tmp_path) -> None:
    runs = benchmark("compatibility_runs")
    monkeypatch.setattr(runs, "MURI_RUN", (sys.executable,))
    clones = make_repository(tmp_path, train=TRAIN, other=TRAIN)
    scripts = [
        compatibility.Script(name, "someone/examples", (f"{name}.py",), copies={f"{name}.py": "src/"})
        for name in ("train", "other")
    ]
    workshop = runs.Workshop(runs.Place(clones, Path(sys.executable), tmp_path / "cache"))
    for script in scripts:
        workshop.prepare(script)
    with pytest.raises(runs.BenchmarkError, match="train ran outside of its group"):
        workshop.run_group(scripts, "process")


def test_losses_and_steps_are_counted_from_outside(observation, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "weight = torch.nn.Parameter(torch.ones(()))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.25)\n"
        "for step in range(4):\n"
        "    (weight * 0.1).backward()\n"
        "    if step % 2: optimizer.step()\n"
    )
    log = tmp_path / "log"
    log.mkdir()
    own = {"PYTHONPATH": str(BENCHMARKS / "compatibility_driver"), "COMPATIBILITY_LOG": str(log)}
    subprocess.run([sys.executable, script], env=os.environ | ONE_THREAD | own, check=True)
    (told,) = [path.read_text().split("\n") for path in log.iterdir()]
    assert told.count("step") == 2
    losses = [float.fromhex(line.removeprefix("loss ")) for line in told if line.startswith("loss")]
    assert losses == pytest.approx([0.1, 0.1, 0.095, 0.095])
    found = observation.observe(0, log, {}, script, script)
    assert (found.steps, found.loss_count) == (2, 4)


def test_a_checkpoint_is_compared_by_its_texts_and_values(observation, tmp_path: Path) -> None:
    import torch

    def digest_of(name: str, value: float) -> str:
        torch.save({"weight": torch.tensor([value]), "names": [name, name], "shape": [(1,), (1,)]}, tmp_path / "m.pt")
        return observation.digest(tmp_path / "m.pt")

    assert digest_of("weight", 1.0) == digest_of("-weight"[1:], 1.0)  # the same text, and another object
    assert len({digest_of("weight", 1.0), digest_of("weight", 2.0), digest_of("bias", 1.0)}) == 3


def test_what_two_plain_runs_have_not_alike_is_not_compared(observation) -> None:
    one = observation.Observation(0, 8, ("a",), 8, {"model.pt": "1", "events": "2"}, "loss 1.5\nend\n", "x")
    two = replace(one, losses=("b",), files={"model.pt": "1", "events": "3"}, out="loss 1.7\nend\n", err="y")
    same = observation.repeatable(one, two, ordered=True)
    assert same == observation.Repeatable(losses=False, files=frozenset({"model.pt"}), out="words", err="")
    assert observation.differences(one, two, same, ordered=True) == []
    # Steps, names of files and words still are.
    three = replace(two, steps=7, files={"model.pt": "1"}, out="loss 1.9\nstop\n")
    assert observation.differences(one, three, same, ordered=True) == [
        "steps: 8 alone, 7 here", "file missing: events", "out: line 2: 'end' alone, 'stop' here",
    ]  # fmt: skip
