"""`muri run` outside of a group: it is Python, and it measures when asked."""

import json
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest
from launcher_harness import Launcher, ends
from polling import DEADLINE_S, until

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
        with open("ends", "a") as file:
            print(time.perf_counter(), file=file)
"""


def compare(launcher: Launcher, text: str, *arguments: str) -> tuple[str, str, int]:
    """Run a script with python and with `muri run`; they must not differ."""
    launcher.warm = False
    launcher.script(text)
    plain = subprocess.run(
        [sys.executable, "train.py", *arguments],
        cwd=launcher.folder,
        env=launcher.environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    code = ends(launcher.member(None, "train.py", *arguments))
    assert (launcher.out(None), launcher.err(None), code) == (plain.stdout, plain.stderr, plain.returncode)
    return plain.stdout, plain.stderr, code


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import sys; print(sys.argv, sys.path, __name__, __file__)", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('message')", 1),
        ("def f(): 1 / 0\nf()", 1),
        ("x = ", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import muri\nfor b in muri.batches([1]):\n with muri.stage('load'): print(b)", 0),
        ("import muri\nmuri.stage('sync')", 1),
    ],
)
def test_alone_it_is_python(launcher: Launcher, text: str, code: int) -> None:
    assert compare(launcher, text, "--lr", "0.1", "-m", "--timing", "--help")[2] == code


def test_missing_script_and_unknown_option_are_explained(launcher: Launcher) -> None:
    assert ends(launcher.member(None, "nowhere.py")) == 2
    assert "there is no script nowhere.py" in launcher.err(None)
    assert ends(launcher.member(None, "--tming", "nowhere.py")) == 2
    assert "--tming" in launcher.err(None)
    assert "Traceback" not in launcher.err(None)


def test_help_shows_examples() -> None:
    command = [sys.executable, "-c", "from muri.cli import main; main()", "run", "--help"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "muri run train.py --lr 0.1" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_timing_and_trace_are_reported_on_demand(launcher: Launcher) -> None:
    script = launcher.script(STAGES)
    trace = launcher.folder / "trace.jsonl"
    assert ends(launcher.member(None, "--timing", "--trace", trace, script, "8")) == 0
    assert "muri: 8 iterations" in launcher.err(None)
    assert "propagate" in launcher.err(None)
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [event["stage"] for event in events].count("propagate") == 8
    assert {event["member"] for event in events} == {"solo"}
    assert abs(events[0]["start_s"] - time.time()) < 3600


def dry_run(launcher: Launcher, script: str, *arguments: object, spec: str = "20:5") -> tuple[int, dict]:
    result = launcher.folder / "result.json"
    variables = {"MURI_DRY_RUN": spec, "MURI_DRY_RUN_RESULT": str(result)}
    code = ends(launcher.member(None, launcher.script(script), *arguments, **variables))
    return code, json.loads(result.read_text())


def test_dry_run_measures_after_warm_up_and_ends_the_script(launcher: Launcher) -> None:
    code, result = dry_run(launcher, STAGES, 100_000)
    assert code == 0, launcher.err(None)
    assert result["iterations"] == 15
    # A sleep takes longer on a busy machine, never shorter; how long iterations took there the script has seen itself.
    at_least_s = {"load": 0.02, "preprocess": 0.01, "propagate": 0.03, "synchronize": 0.005}
    assert all(result[f"{stage}_s"] >= seconds for stage, seconds in at_least_s.items())
    assert sum(result[f"{stage}_s"] for stage in at_least_s) <= result["iteration_s"]
    ends_s = [float(line) for line in (launcher.folder / "ends").read_text().splitlines()]
    took_s = [after - before for before, after in pairwise(ends_s)]
    warm_up_s, measured_s = took_s[:4], took_s[4:]
    assert 0.8 * min(measured_s) <= result["iteration_s"] <= 1.2 * max(measured_s)
    assert result["load_s"] < min(warm_up_s), "the slow first iterations do not count"
    assert result["gpu_mem_gib"] == 0
    assert launcher.out(None).split() == [str(step) for step in range(20)]


@pytest.mark.parametrize(("iterations", "measured"), [(12, 7), (8, 3)])
def test_dry_run_of_a_script_that_ends_early_counts(launcher: Launcher, iterations: int, measured: int) -> None:
    code, result = dry_run(launcher, STAGES, iterations)
    assert (code, result["iterations"]) == (0, measured)


def test_dry_run_with_too_few_iterations_says_so(launcher: Launcher) -> None:
    code, result = dry_run(launcher, STAGES, 7)
    assert code == 0
    assert "ended after 7 iterations, 2 of them after the warm-up of 5" in result["error"]


@pytest.mark.parametrize(("script", "code"), [("print('x')", 0), ("1 / 0", 1), ("import os; os._exit(4)", 4)])
def test_dry_run_without_stages_says_so(launcher: Launcher, script: str, code: int) -> None:
    got, result = dry_run(launcher, script)
    assert got == code
    assert "no stages marked" in result["error"]


def test_dry_run_that_is_ended_by_a_signal_leaves_a_result(launcher: Launcher) -> None:
    result = launcher.folder / "result.json"
    variables = {"MURI_DRY_RUN": "30:10", "MURI_DRY_RUN_RESULT": str(result)}
    process = launcher.member(
        None, launcher.script("print('on', flush=True)\nimport time\ntime.sleep(600)"), **variables
    )
    until(lambda: "on" in launcher.out(None), "the script")
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
    code, result = dry_run(launcher, script)
    assert (code, result["iterations"]) == (0, 15)


@pytest.mark.parametrize("spec", ["30", "x:1", "5:5", "5:-1"])
def test_malformed_dry_run_is_refused(launcher: Launcher, spec: str) -> None:
    variables = {"MURI_DRY_RUN": spec, "MURI_DRY_RUN_RESULT": str(launcher.folder / "r.json")}
    assert ends(launcher.member(None, launcher.script("print('ran')"), **variables)) == 2
    assert spec in launcher.err(None)
    assert launcher.out(None) == ""


def test_import_of_the_command_is_light() -> None:
    heavy = ("torch", "numpy", "muri.slurm_plugin", "muri.launcher.isolation")
    modules = "sys, muri.launcher.run.command, muri.launcher.api.stages"
    code = f"import {modules}; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_import_of_the_runtime_is_light() -> None:
    heavy = ("torch", "numpy", "scipy", "networkx", "pydantic", "click", "rich", "muri.slurm_plugin")
    code = f"import sys, muri.launcher.runtime.main; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
