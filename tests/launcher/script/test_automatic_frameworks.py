"""Plain PyTorch, Lightning and Hugging Face scripts that never heard of Muri, alone and in a group."""

import json
import sys
from pathlib import Path

import own_time
import pytest
from launcher_harness import Launcher, ends, launcher_in
from polling import until

EXAMPLES = Path(__file__).parents[3] / "examples"
READ_MS = 2.0
SCRIPTS = {
    "train_plain.py": ("--epochs", "2", "--samples", "160"),
    "train_lightning.py": ("--epochs", "1", "--samples", "320"),
    "train_huggingface.py": ("--steps", "10"),
}
BATCH = {"train_plain.py": 32, "train_lightning.py": 32, "train_huggingface.py": 16}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="module")
def plain_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The last line that each script prints under plain Python."""
    with launcher_in(tmp_path_factory.mktemp("plain")) as launcher:
        environment = {k: v for k, v in launcher.environment.items() if not k.startswith("MURI_")} | ENVIRONMENT
        running = {
            name: launcher.start(name, [sys.executable, EXAMPLES / name, *arguments], environment)
            for name, arguments in SCRIPTS.items()
        }
        for name, process in running.items():
            assert ends(process) == 0, launcher.err(name)
        return {name: launcher.out(name).splitlines()[-1] for name in SCRIPTS}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name != "train_plain.py" else ()) for name in SCRIPTS]
)
def test_dry_run_finds_the_stages(launcher: Launcher, name: str) -> None:
    result = launcher.folder / "result.json"
    wish = {"MURI_DRY_RUN": "8:3", "MURI_DRY_RUN_RESULT": str(result)}
    command = [sys.executable, own_time.__file__, EXAMPLES / name, *SCRIPTS[name], "--read-ms", READ_MS]
    assert ends(launcher.start(None, command, launcher.environment | ENVIRONMENT | wish)) == 0, launcher.err(None)
    times = json.loads(result.read_text())
    assert times["iterations"] == 5
    read_s = BATCH[name] * READ_MS / 1000
    assert read_s <= times["load_s"] < times["iteration_s"]
    assert 0 < times["preprocess_s"] < times["load_s"]
    assert times["propagate_s"] > 0
    stages_s = sum(times[f"{stage}_s"] for stage in ("load", "preprocess", "propagate", "synchronize"))
    assert 0.4 * times["iteration_s"] < stages_s <= times["iteration_s"]


@pytest.mark.parametrize(
    ("start", "names"),
    [("threads", ("train_plain.py", "train_plain.py")), ("runtime", ("train_lightning.py", "train_huggingface.py"))],
    ids=str,
)
def test_two_members_train_as_if_alone(
    launcher: Launcher, plain_results: dict[str, str], start: str, names: tuple[str, str]
) -> None:
    launcher.environment |= ENVIRONMENT
    getattr(launcher, start)("101", "102")
    members = {
        job: launcher.member(job, EXAMPLES / name, *SCRIPTS[name])
        for job, name in zip(("101", "102"), names, strict=True)
    }
    for job, name in zip(members, names, strict=True):
        assert ends(members[job]) == 0, launcher.err(job)
        assert launcher.out(job).splitlines()[-1] == plain_results[name]
    # The status file may follow a script's exit code.
    until(lambda: {member["state"] for member in launcher.status()["members"].values()} == {"ended"}, "the last status")
    status = launcher.status()["members"]
    assert [status[job]["iterations"] for job in members] == [10, 10]
    for job in members:
        assert min(status[job]["stage_s"][stage] for stage in ("load", "preprocess", "propagate")) > 0
