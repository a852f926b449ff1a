"""`muri-lab pair` and `muri-lab fit`: real scripts as real processes."""

import json

import psutil
import pytest
from profile_builders import make_profile
from profile_commands import muri_lab

from muri.profiler.store import ProfileStore

# Processor sharing without a processor, so that other load on the machine does not matter: an iteration takes twice as
# long unless the other script is stopped, and its end is noted when it was due, not when the machine got to it.
SHARING = """\
import os, signal, sys, time
own, other = sys.argv[1:3]
due_s = time.perf_counter()
def go_on(*_):
    global due_s
    due_s = time.perf_counter()
def is_stopped(name):
    try:
        with open(name) as pid, open(f"/proc/{pid.read()}/stat") as state:
            return state.read().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has not started
        return True
signal.signal(signal.SIGCONT, go_on)
with open(own, "w") as pid:
    pid.write(str(os.getpid()))
with open(os.environ["MURI_ITERATION_LOG"], "a", buffering=1) as log:
    while True:
        due_s += 0.02 if is_stopped(other) else 0.04
        time.sleep(max(0.0, due_s - time.perf_counter()))
        print(due_s, file=log)
"""
SHORT = "import time, muri\nfor _ in range(20):\n    with muri.stage('load'):\n        time.sleep(0.002)\n"
BROKEN = "raise RuntimeError('no such weights')\n"
IDLE = "import time\ntime.sleep(600)\n"

pytestmark = pytest.mark.usefixtures("path")


def test_two_scripts_that_share_a_resource(tmp_path, capsys):
    (tmp_path / "job.py").write_text(SHARING)
    names = ("--model-a", "first:4", "--model-b", "second")
    code, out, err = muri_lab(capsys, "pair", "job.py one two", "job.py two one", *names, "--seconds", 4)
    assert code == 0, err
    assert "round 3 of" in err
    assert "first b4 1×gpu" in out
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = muri_lab(capsys, "pair", "--list", "--json")
    (found,) = json.loads(out)["pairs"]
    for side, model in ((found["a"], "first"), (found["b"], "second")):
        assert side["key"]["model"] == model
        assert 1.4 < side["ratio"] < 2.3
        assert side["iterations"] > 10
        assert side["solo_s"] < side["shared_s"]
    assert found["rounds"] >= 3
    assert not [child for child in psutil.Process().children() if "job.py" in " ".join(child.cmdline())]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (SHORT, (), "let it run longer"),
        (BROKEN, (), "failed with exit code 1 after 0 iterations: RuntimeError: no such weights"),
        (IDLE, ("--startup", 1), "not steady after 1 s: no iterations; mark them"),
    ],
    ids=["ends early", "fails", "never iterates"],
)
def test_scripts_that_cannot_be_measured(tmp_path, capsys, text, options, message):
    (tmp_path / "job.py").write_text(text)
    code, out, err = muri_lab(capsys, "pair", "job.py", "job.py", "--no-store", *options)
    assert (code, out) == (1, "")
    assert message in err
    assert "Traceback" not in err


def test_what_to_expect_of_a_pair_that_was_not_measured(path, capsys):
    with ProfileStore(path) as store:
        gpu_bound = {"load_s": 0.0, "preprocess_s": 0.0, "propagate_s": 1.0, "iteration_s": 1.0}
        store.put_all([make_profile("a", **gpu_bound), make_profile("b", **(gpu_bound | {"iteration_s": 2.0}))])
    code, out, err = muri_lab(capsys, "pair", "--expect", "a", "b")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "a (batch 64, 1 × gpu): 1.50 times as long (estimated)",
        "b (batch 64, 1 × gpu): 1.50 times as long (estimated)",
    ]
    found = json.loads(muri_lab(capsys, "pair", "--expect", "a:64:1:gpu", "b", "--json")[1])
    assert (found["source"], found["ratio_a"]) == ("estimated", pytest.approx(1.5))
    code, _, err = muri_lab(capsys, "pair", "--expect", "a", "unheard")
    assert code == 2
    assert "nothing is known of unheard" in err


def test_fit_prints_and_stores_the_line(path, capsys):
    with ProfileStore(path) as store:
        store.put_all(make_profile(batch_size=n, iteration_s=0.1 + 0.01 * n, synchronize_s=0.0) for n in (16, 32, 64))
    code, out, err = muri_lab(capsys, "fit", "resnet18")
    assert (code, err) == (0, "")
    assert "100 ms + 10 ms per sample; R² 1.000" in out
    with ProfileStore(path) as store:
        (document,) = store.documents("batch-fit")
    assert document.name == "resnet18 (1 × gpu)"
    assert document.body["per_unit_s"] == pytest.approx(0.01)
    fits = json.loads(muri_lab(capsys, "fit", "resnet18", "--json")[1])["fits"]
    assert fits["resnet18 (1 × gpu)"]["fixed_s"] == pytest.approx(0.1)
