"""Dry runs of real scripts, each a process of its own."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from click.testing import CliRunner
from polling import until

from muri.profiler.commands import profile
from muri.profiler.dryrun.messages import Limits
from muri.profiler.dryrun.runner import DryRunFailedError, NoScriptError, measure_script
from muri.profiler.lookup import of_command
from muri.profiler.store import ProfileStore

LIMITS = Limits(12, 20.0, time_limit_s=600.0)

VIRTUAL_TIME = """
    import os, time
    from muri.launcher.script.script_clock import current_clock
    really_sleep, begin_s = time.sleep, time.perf_counter()
    now_s = begin_s
    def sleep(seconds):
        global now_s
        now_s += seconds
        while now_s - begin_s > 0.5 and not os.path.exists("HEARD"):
            really_sleep(0.01)
    time.perf_counter = current_clock().now = lambda: now_s
    time.sleep = sleep
"""
"""The beginning of a script in which time passes only while it sleeps; it goes on after half a second when `HEARD` is
there, a file that says that its first report was read."""

SLEEPS = """
    import time, muri
    def batches():
        for step in range(400):
            time.sleep(0.2 if step < 2 else 0.02)
            yield step
    for batch in muri.batches(batches(), prefetch=PREFETCH):
        with muri.stage("propagate"):
            time.sleep(0.01)
    print("the end")
"""

FAILS = """
    import muri
    for step in range(4):
        with muri.stage("load"): pass
        with muri.stage("propagate"): pass
    raise ValueError("no such dataset: cats")
"""

UNMARKED = """
    import torch, muri
    torch.set_num_threads(1)
    layer = torch.nn.Linear(64, 64)
    for batch in muri.batches(range(400)):
        inputs = torch.randn(64, 64)
        for _ in range(200):
            inputs = (inputs.sin() + inputs.cos()).tanh()
        with muri.stage("propagate"):
            layer(inputs).sum().backward()
"""

WORKERS = """
    import multiprocessing, time, torch
    from torch.utils.data import DataLoader, Dataset
    torch.set_num_threads(1)
    done = multiprocessing.Value("i", 0)
    def augment(sample):
        time.sleep(0.02)
        return sample
    class Samples(Dataset):
        def __init__(self): self.transform = augment
        def __len__(self): return 400
        def __getitem__(self, index):
            while done.value < index - index % 4: time.sleep(0.001)
            time.sleep(0.04)
            return self.transform(torch.zeros(64))
    model = torch.nn.Linear(64, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        for batch in DataLoader(Samples(), num_workers=4):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            done.value += 1
    finally:
        done.value = 400
"""
"""Four workers, none of which begins a batch before the last four are done: a stall leaves no batch ready. At the end
none waits for more, or the script's exit would wait for each."""


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def test_stages_of_a_script_without_overlap(script, tmp_path):
    told, heard = [], tmp_path / "heard"

    def hear(progress):
        told.append(progress)
        heard.touch()

    text = (VIRTUAL_TIME + SLEEPS).replace("HEARD", str(heard)).replace("PREFETCH", "0")
    result = measure_script([script(text)], limits=LIMITS, on_progress=hear)
    assert told[0]["iterations"] == 1
    assert result.stage_s == pytest.approx((0.02, 0, 0.01, 0))
    assert result.iteration_s == pytest.approx(0.03)
    assert (result.detail.warmup_iterations, result.iterations) == (2, 10)
    assert 0 < result.detail.host_mem_gib < 2


def test_hidden_reading_owns_only_what_the_loop_waits_for(script):
    result = measure_script([script(SLEEPS.replace("PREFETCH", "1"))], limits=LIMITS)
    load_s, _, propagate_s, _ = result.stage_s
    assert propagate_s >= 0.01
    # The loop waits for all reading but what goes on while it computes, however long either of them takes.
    assert result.detail.busy_s[0] - propagate_s <= load_s + 1e-9
    assert load_s < result.detail.busy_s[0]
    assert load_s + propagate_s <= result.iteration_s + 1e-9
    assert result.detail.busy_s[0] > 0.01  # 0.02 but for what goes on in iterations that do not count


def test_workers_and_gradients_of_a_script_that_marks_nothing(script):
    result = measure_script([script(WORKERS)], limits=Limits(20, 20.0, time_limit_s=600.0))
    assert result.detail.warmup_iterations >= 4 * 2
    assert result.iterations % 4 == 0
    # Each four batches take 0.04 s to read and 0.02 s to transform, less what lies between two iterations.
    load_s, preprocess_s, propagate_s, _ = result.stage_s
    assert load_s >= 0.7 * 0.04 / 4
    assert preprocess_s > 0
    assert propagate_s > 0
    assert result.iteration_s >= 0.7 * 0.06 / 4
    assert result.detail.gradient_mib == pytest.approx((64 * 256 + 256) * 4 / 1024**2)


def test_operators_outside_of_stages_are_found_by_the_profiler(script):
    result = measure_script([script(UNMARKED)], limits=LIMITS)
    assert result.stage_s[1] > 0  # no mark of the script tells of this stage
    assert sum(result.stage_s) <= result.iteration_s * (1 + 1e-9)


def test_a_script_that_fails_tells_its_last_words(script):
    with pytest.raises(DryRunFailedError, match=r"(?s)exit code 1.*no such dataset: cats"):
        measure_script([script(FAILS)], limits=LIMITS)


def test_a_script_that_never_iterates_and_one_that_hangs(script):
    with pytest.raises(DryRunFailedError, match=r"(?s)no stages marked.*last words: hello"):
        measure_script([script("print('hello')")], limits=LIMITS)
    with pytest.raises(DryRunFailedError, match=r"no result within 0\.2 s"):
        measure_script([script("import time; time.sleep(600)")], limits=Limits(time_limit_s=0.2))


@pytest.mark.parametrize("command", [[], ["-m"], ["/nowhere/train.py"]])
def test_a_script_that_is_not_there(command):
    with pytest.raises(NoScriptError):
        measure_script(command)


def test_the_command_stores_the_profile_under_a_fingerprint(script, tmp_path):
    path, store_path = script(SLEEPS.replace("PREFETCH", "0")), tmp_path / "p.db"
    done = CliRunner().invoke(profile, ["run", "--json", "--iterations", "10", "--store", str(store_path), "--", path])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["model"] == of_command([path])
    assert told["stored"]
    assert told["stopped"]
    with ProfileStore(store_path, read_only=True) as store:
        (stored,) = store.list()
    assert (stored.load_s, stored.source) == (told["load_s"], "dry-run")
    assert stored.detail.confidence == told["detail"]["confidence"]


def test_an_interrupt_ends_the_script_and_stores_nothing(script, tmp_path):
    pid_file, store_path = tmp_path / "pid", tmp_path / "p.db"
    path = script(f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    code = "from muri.cli import main; main()"
    command = [sys.executable, "-c", code, "profile", "run", "--store", str(store_path), "--", path]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: pid_file.exists() and pid_file.read_text(), "the script's beginning")
        process.send_signal(signal.SIGINT)
        assert "nothing was stored" in process.communicate(timeout=240)[1]
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    with ProfileStore(store_path, read_only=True) as store:
        assert store.list() == ()


def test_fingerprints_tell_content_and_arguments_apart(script, tmp_path, monkeypatch):
    path = script("pass")
    names = {of_command([path]), of_command([path, "a", "b"]), of_command([path, "ab"])}
    assert of_command([path]) in names
    names.add(of_command([script("pass  # changed")]))
    assert len(names) == 4
    assert all(name.startswith("train.py@") and len(name) == len("train.py@") + 8 for name in names)
    monkeypatch.chdir(tmp_path)
    before = of_command(["-m", "train"])
    script("pass  # changed again")
    assert of_command(["-m", "train"]) != before
    assert of_command(["-m", "elsewhere"]).startswith("elsewhere@")
