"""`muri run` outside of a group: it is Python, and it measures when asked."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import own_time
import pytest
from launcher_harness import Launcher, ends
from polling import DEADLINE_S, until

from muri.profiler.dryrun.messages import ITERATION_LOG_VARIABLE, DryRunRequest, Limits

STAGES = """
    import sys, time
    import muri
    iterations = int(sys.argv[1])
    def loader():
        for i in range(iterations):
            time.sleep(0.02 if i >= 5 else 0.2)
            yield i
    for step, batch in enumerate(muri.batches(loader())):
        with muri.stage("preprocess"):
            time.sleep(0.01)
        with muri.stage("propagate"):
            time.sleep(0.03)
        with muri.stage("synchronize"):
            time.sleep(0.005)
        print(step, flush=True)
"""


def compare(launcher: Launcher, text: str, *arguments: str, **variables: str) -> int:
    """Run a script with python and with `muri run`; they must not differ."""
    launcher.warm = False
    launcher.script(text)
    command = [sys.executable, "train.py", *arguments]
    plain = subprocess.run(
        command, cwd=launcher.folder, env=launcher.environment, check=False, capture_output=True, text=True,
        timeout=DEADLINE_S,
    )  # fmt: skip
    code = ends(launcher.member(None, "train.py", *arguments, **variables))
    assert (launcher.out(None), launcher.err(None), code) == (plain.stdout, plain.stderr, plain.returncode)
    return code


ARGUMENTS = ("--lr", "0.1", "-m", "--timing", "--help")
SEEN = "import sys; print(sys.argv, sys.path, __name__, __file__); sys.exit(3)"


def test_alone_it_is_python(launcher: Launcher) -> None:
    text = "import muri\nfor b in muri.batches([1]):\n with muri.stage('load'): print(b)"
    assert compare(launcher, text, *ARGUMENTS) == 0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (SEEN, 3),
        ("import sys; sys.exit('message')", 1),
        ("def f(): 1 / 0\nf()", 1),
        ("x = ", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import muri\nmuri.stage('sync')", 1),
    ],
)
def test_measured_it_is_python_too(launcher: Launcher, text: str, code: int) -> None:
    log = {ITERATION_LOG_VARIABLE: str(launcher.folder / "log")}  # says nothing itself
    assert compare(launcher, text, *ARGUMENTS, **log) == code


def test_missing_script_and_unknown_option_are_explained(launcher: Launcher) -> None:
    assert ends(launcher.member(None, "nowhere.py")) == 2
    assert "there is no script nowhere.py" in launcher.err(None)
    assert ends(launcher.member(None, "--tming", "nowhere.py")) == 2
    assert "--tming" in launcher.err(None)
    assert "Traceback" not in launcher.err(None)


def test_dry_run_measures_after_warm_up_and_ends_the_script(launcher: Launcher) -> None:
    """In time that goes on while the script sleeps or computes: the machine may be busy."""
    request = DryRunRequest(Limits(15, fixed_warmup=5), launcher.folder / "result.json")
    command = [sys.executable, own_time.__file__, str(launcher.script(STAGES)), "100000"]
    streams = {kind: launcher.path(None, kind[3:]).open("wb") for kind in ("stdout", "stderr")}
    process = launcher.spawn(command, launcher.environment | request.environment(), cwd=launcher.folder, **streams)
    assert ends(process) == 0, launcher.err(None)
    result = json.loads(request.result_path.read_text())
    assert result["iterations"] == 15
    for stage, seconds in {"load": 0.02, "preprocess": 0.01, "propagate": 0.03, "synchronize": 0.005}.items():
        # A fetch's time of computing is preprocess, told by another clock, which is read microseconds later.
        assert 0.99 * seconds < result[f"{stage}_s"] < 2 * seconds, "the slow first iterations do not count"
    assert 0.065 <= result["iteration_s"] < 0.13
    assert result["gpu_mem_gib"] == 0
    assert launcher.out(None).split() == [str(step) for step in range(20)]


LOOP = """
    import sys
    import muri
    for step in muri.batches(range(int(sys.argv[1]))):
        with muri.stage("propagate"):
            pass
    sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("iterations", "code", "error"),
    [
        (8, 0, None),
        (7, 0, "^the script ended after 7 iterations, 2 of them after the warm-up of 5"),
        (7, 3, "^the script failed with exit code 3: .* ended after 7 iterations"),
    ],
)
def test_dry_run_of_a_script_that_ends_early_counts_what_suffices(
    launcher: Launcher, iterations: int, code: int, error: str | None
) -> None:
    got, result = launcher.dry_run("20:5", launcher.script(LOOP), iterations, code)
    assert got == code
    assert result["iterations"] == 3 if error is None else re.search(error, result["error"])


@pytest.mark.parametrize(("rank", "answers"), [("0", True), ("1", False)])
def test_only_the_first_rank_of_a_dry_run_answers(launcher: Launcher, rank: str, answers: bool) -> None:
    task = {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    code, result = launcher.dry_run("20:5", launcher.script(LOOP), 8, 0, **task)
    assert (code, bool(result)) == (0, answers), launcher.err(None)


@pytest.mark.parametrize(("script", "code"), [("print('x')", 0), ("1 / 0", 1), ("import os; os._exit(4)", 4)])
def test_dry_run_without_stages_says_so(launcher: Launcher, script: str, code: int) -> None:
    got, result = launcher.dry_run("20:5", launcher.script(script))
    assert got == code
    assert "no stages marked" in result["error"]


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of a signal: it begins to pass signals on a moment after the script's start."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> number - 1 & 1)


def test_dry_run_that_is_ended_by_a_signal_leaves_a_result(launcher: Launcher) -> None:
    result = launcher.folder / "result.json"
    variables = {"MURI_DRY_RUN": "30:10", "MURI_DRY_RUN_RESULT": str(result)}
    process = launcher.member(
        None, launcher.script("print('on', flush=True)\nimport time\ntime.sleep(600)"), **variables
    )
    until(lambda: "on" in launcher.out(None) and catches(process.pid, signal.SIGTERM), "the script")
    process.terminate()
    assert ends(process) == 143
    assert "SIGTERM" in json.loads(result.read_text())["error"]


def test_script_that_swallows_the_end_of_its_dry_run_is_ended(launcher: Launcher) -> None:
    script = """
        import muri
        while True:
            try:
                with muri.stage("load"): pass
                with muri.stage("propagate"): pass
            except BaseException: pass
    """
    code, result = launcher.dry_run("20:5", launcher.script(script))
    assert (code, result["iterations"]) == (0, 15)


@pytest.mark.parametrize("spec", ["30", "5:5"])
def test_malformed_dry_run_is_refused(launcher: Launcher, spec: str) -> None:
    assert launcher.dry_run(spec, launcher.script("print('ran')")) == (2, {})
    assert spec in launcher.err(None)
    assert launcher.out(None) == ""


HEAVY = {
    "muri.launcher.run.command, muri.launcher.script.stages": ("torch", "numpy", "muri.launcher.shared_process"),
    "muri.launcher.runtime.main": ("torch", "numpy", "scipy", "networkx", "pydantic", "click", "rich"),
}


@pytest.mark.parametrize("modules", HEAVY)
def test_import_of_the_command_and_of_the_runtime_is_light(modules: str) -> None:
    heavy = (*HEAVY[modules], "muri.slurm_plugin")
    code = f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
