"""Real members in a real runtime: what each must have for itself, and how it ends."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from group_words import runtime_words
from launcher_harness import Launcher, ends
from polling import DEADLINE_S, until

LOOP = """
    import sys, time
    import muri
    print("started", flush=True)
    for step in muri.batches(range(int(sys.argv[1]))):
        for name in ("preprocess", "propagate", "synchronize"):
            with muri.stage(name):
                time.sleep(0.002)
    print("finished")
"""


@pytest.mark.parametrize(
    ("ending", "code", "error"),
    [
        ("", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("import sys; sys.exit(259)", 3, ""),
        ("import os; os._exit(7)", 7, ""),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_exit_code_is_the_scripts(launcher: Launcher, ending: str, code: int, error: str) -> None:
    launcher.threads("101")
    assert ends(launcher.member("101", launcher.script(ending))) == code
    assert error in launcher.err("101")
    assert bool(error) == bool(launcher.err("101"))


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    raise ValueError('bad')\nf()\n",
        "import helper\n",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error\n",
        "import muri\nmuri.stage('sync')\n",
    ],
)
def test_traceback_is_the_one_of_python(launcher: Launcher, text: str) -> None:
    script = launcher.script(text)
    launcher.script("import no_such_module\n", "helper.py")
    launcher.threads("101")
    assert ends(launcher.member("101", "train.py")) == 1
    command = [sys.executable, script.name]
    plain = subprocess.run(command, cwd=script.parent, check=False, capture_output=True, text=True)
    assert launcher.err("101") == plain.stderr


def test_syntax_error_and_missing_module(launcher: Launcher) -> None:
    launcher.threads("101", "102")
    assert ends(launcher.member("101", launcher.script("x ="))) == 1
    assert "SyntaxError" in launcher.err("101")
    assert ends(launcher.member("102", "-m", "no_such_module")) == 2
    assert "no_such_module" in launcher.err("102")


def test_failure_of_one_member_leaves_the_others_running(launcher: Launcher) -> None:
    launcher.threads("101", "102", "103")
    loop = launcher.script(LOOP)
    thread_crash = launcher.script(
        """
        import threading
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start(); thread.join()
        raise MemoryError("out of memory")
        """,
        "crash.py",
    )
    good = launcher.member("101", loop, "200")
    bad = [launcher.member("102", thread_crash), launcher.member("103", launcher.script("exit(9)", "exit.py"))]
    assert [ends(process) for process in bad] == [1, 9]
    assert ends(good) == 0
    assert launcher.out("101") == "started\nfinished\n"
    assert launcher.err("101") == ""
    assert "ZeroDivisionError" in launcher.err("102")
    assert "MemoryError: out of memory" in launcher.err("102")


def test_output_of_members_is_apart_even_from_threads_and_subprocesses(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import logging, os, subprocess, sys, threading
        name, count = sys.argv[1], int(sys.argv[2])
        logging.basicConfig(level=logging.INFO, format="%(message)s")

        def work(part):
            for line in range(count):
                sys.stdout.write(f"{name} {part} {line}\\n")  # as one piece: print() writes the newline apart

        threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        sys.stdout.buffer.write(bytes([0, 255, 10])); sys.stdout.flush()
        subprocess.run(["sh", "-c", "echo $MARK from the shell in $PWD"], check=True)
        logging.info("%s logs", name)
        """
    )
    launcher.threads("101", "102")
    processes = [launcher.member(job, script, f"job{job}", 25_000, MARK=f"mark{job}") for job in ("101", "102")]
    assert [ends(process) for process in processes] == [0, 0]
    for job in ("101", "102"):
        raw = launcher.path(job, "out").read_bytes()
        lines = raw.split(b"\n")
        expected = {f"job{job} {part} {line}".encode() for part in range(4) for line in range(25_000)}
        assert len(lines) == 100_000 + 3
        assert set(lines[:100_000]) == expected
        assert lines[100_000] == b"\x00\xff"
        assert lines[100_001] == f"mark{job} from the shell in {launcher.folder}".encode()
        assert launcher.err(job) == f"job{job} logs\n"


def test_lines_arrive_as_they_are_printed(launcher: Launcher) -> None:
    launcher.threads("101")
    process = launcher.member("101", launcher.script("print('first')\nimport time\ntime.sleep(600)\n"))
    until(lambda: launcher.out("101") == "first\n", "the first line")
    process.terminate()
    assert ends(process) == 143


def test_argv_directory_environment_umask_and_path_are_the_members(launcher: Launcher) -> None:
    text = """
        import json, os, sys, threading
        os.environ["ADDED"] = sys.argv[1]
        other = os.getcwd()
        os.chdir("inner")
        seen = []
        thread = threading.Thread(target=lambda: seen.append([os.getcwd(), sys.argv[1], os.getenv("ADDED")]))
        thread.start(); thread.join()
        umask = os.umask(0)
        print(json.dumps([sys.argv, other, seen, os.environ["OWN"], sys.path[0], __name__, umask,
                          sys.modules["__main__"].json is json, "SLURM_JOB_ID" in os.environ]))
    """
    launcher.threads("101", "102")
    for job in ("101", "102"):
        script = launcher.script(text, folder=f"home{job}")
        (script.parent / "inner").mkdir()
        process = launcher.member(job, script.name, f"--{job}", "x y", cwd=script.parent, OWN=f"own{job}")
        assert ends(process) == 0, launcher.err(job)
        home = str(script.parent)
        seen = [[f"{home}/inner", f"--{job}", f"--{job}"]]
        argv = ["train.py", f"--{job}", "x y"]
        umask = os.umask(0o022)
        os.umask(umask)
        assert json.loads(launcher.out(job)) == [argv, home, seen, f"own{job}", home, "__main__", umask, True, True]


def test_modules_run_with_dash_m(launcher: Launcher) -> None:
    package = launcher.script("", "__init__.py", folder="package").parent
    (package / "__main__.py").write_text("import sys; print(__spec__.name, __package__, sys.argv)")
    launcher.threads("101")
    assert ends(launcher.member("101", "-m", "package", "--lr", "1")) == 0, launcher.err("101")
    assert launcher.out("101") == f"package.__main__ package ['{package}/__main__.py', '--lr', '1']\n"


def test_redirected_output_stays_within_the_member(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import contextlib, io, sys, time
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            print("inside"); time.sleep(0.5)
        print("after", repr(text.getvalue()))
        """
    )
    launcher.threads("101", "102")
    first = launcher.member("101", script)
    second = launcher.member(
        "102", launcher.script("import time\nfor i in range(60): print(i); time.sleep(.02)", "b.py")
    )
    assert [ends(first), ends(second)] == [0, 0]
    assert launcher.out("101") == "after 'inside\\n'\n"
    assert launcher.out("102").split() == [str(i) for i in range(60)]


def test_exit_functions_pickling_and_waiting_threads(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import atexit, pickle, threading, time
        class Model: pass
        assert type(pickle.loads(pickle.dumps(Model()))) is Model
        atexit.register(print, "exit function")
        threading.Thread(target=lambda: (time.sleep(0.3), print("thread done"))).start()
        print("main done")
        """
    )
    launcher.threads("101")
    assert ends(launcher.member("101", script)) == 0, launcher.err("101")
    assert launcher.out("101") == "main done\nthread done\nexit function\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)])
def test_signal_ends_the_script_and_runs_its_clean_up(launcher: Launcher, number: int, code: int) -> None:
    script = launcher.script(
        """
        import muri
        print("started")
        try:
            while True:
                with muri.stage("propagate"):
                    sum(range(1000))
        finally:
            print("clean-up")
        """
    )
    launcher.threads("101", "102")
    process = launcher.member("101", script)
    other = launcher.member("102", launcher.script(LOOP, "loop.py"), 100)
    until(lambda: "started" in launcher.out("101"), "the script")
    process.send_signal(number)
    assert ends(process) == code
    assert launcher.out("101") == "started\nclean-up\n"
    assert ends(other) == 0


def test_signal_handler_of_the_script_runs(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import signal, sys, time
        import muri
        def handle(signum, frame):
            print("handler", signum)
            sys.exit(5)
        assert signal.signal(signal.SIGTERM, handle) == signal.SIG_DFL
        print("started")
        while True:
            if len(sys.argv) > 1:
                time.sleep(0.01)
            else:
                with muri.stage("load"):
                    time.sleep(0.01)
        """
    )
    launcher.threads("101", "102")
    processes = [launcher.member("101", script), launcher.member("102", script, "without-stages")]
    for job, process in zip(("101", "102"), processes, strict=True):
        until(lambda job=job: "started" in launcher.out(job), "the script")
        process.terminate()
        assert ends(process) == 5
        assert launcher.out(job) == "started\nhandler 15\n"


def test_script_that_swallows_sigterm_is_told_again(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import time
        print("started")
        for attempt in range(3):
            try:
                time.sleep(600)
            except BaseException:
                print("swallowed")
            while attempt == 0:
                try:
                    while True: sum(range(1000))
                except SystemExit:
                    print("again"); raise
        """
    )
    launcher.threads("101")
    process = launcher.member("101", script)
    until(lambda: "started" in launcher.out("101"), "the script")
    process.terminate()
    assert ends(process) == 143
    assert launcher.out("101") == "started\nswallowed\nagain\n"


@pytest.mark.parametrize("discipline", ["fair", "lockstep"])
def test_client_that_is_killed_cancels_its_session_only(launcher: Launcher, discipline: str) -> None:
    launcher.threads("101", "102", options=("--discipline", discipline))
    script = launcher.script(LOOP)
    victim, other = launcher.member("101", script, 100_000), launcher.member("102", script, 400)
    until(lambda: "started" in launcher.out("101") and "started" in launcher.out("102"), "both scripts")
    victim.kill()
    until(lambda: launcher.status()["members"]["101"]["state"] == "ended", "the cancelled session")
    assert ends(other) == 0
    assert ends(launcher.member("101", script, 3)) == 0


def test_status_file_counts_sessions_iterations_and_stages(launcher: Launcher) -> None:
    runtime = launcher.threads("101", "102", options=("--trace", str(launcher.folder / "trace.jsonl")))
    script = launcher.script(LOOP)
    for _ in range(2):
        assert ends(launcher.member("101", script, 20)) == 0
    until(lambda: launcher.status()["members"]["101"]["iterations"] == 40, "40 iterations")
    status = launcher.status()
    assert status["pid"] == runtime.pid
    assert status["discipline"] == "fair"
    assert status["members"]["102"]["state"] == "waiting"
    member = status["members"]["101"]
    assert (member["state"], member["sessions"], member["exit_code"]) == ("ended", 2, 0)
    assert list(member["stage_s"]) == ["load", "preprocess", "propagate", "synchronize"]
    assert 0.002 <= member["stage_s"]["propagate"] <= member["iteration_s"]
    runtime.terminate()
    assert ends(runtime) == 0
    events = [json.loads(line) for line in (launcher.folder / "trace.jsonl").read_text().splitlines()]
    assert sum(event["stage"] == "propagate" for event in events) == 40
    assert all(event["start_s"] <= event["end_s"] and event["member"] == "101" for event in events)
    assert abs(events[-1]["end_s"] - time.time()) < 3600


def test_second_script_of_a_member_at_the_same_time_is_refused(launcher: Launcher) -> None:
    launcher.threads("101")
    script = launcher.script(LOOP)
    first = launcher.member("101", script, 100_000)
    until(lambda: "started" in launcher.out("101"), "the first script")
    second = launcher.member("101", script, 1)
    assert ends(second) == 2
    assert "already runs a script" in launcher.err("101")
    assert first.poll() is None


def test_sockets_vanish_with_the_runtime_and_stale_ones_do_no_harm(launcher: Launcher) -> None:
    first = launcher.threads("101")
    first.kill()
    ends(first)
    assert list(launcher.run_dir.iterdir())
    second = launcher.threads("101")
    assert ends(launcher.member("101", launcher.script("print('ok')"))) == 0
    assert launcher.out("101") == "ok\n"
    second.terminate()
    assert ends(second) == 0
    assert not list(launcher.run_dir.iterdir())
    assert ends(launcher.member("101", "train.py")) == 0  # alone now


def test_two_runtimes_cannot_serve_one_member(launcher: Launcher) -> None:
    launcher.threads("101")
    command = [sys.executable, "-m", "muri.launcher.runtime.main", "--preload", "", *runtime_words(["101"])]
    again = subprocess.run(
        command, env=launcher.environment, check=False, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert again.returncode == 1
    assert "another runtime" in again.stderr
    assert "Traceback" not in again.stderr
    assert ends(launcher.member("101", launcher.script("print('still there')"))) == 0


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"members": [{"job_id": "x"}]}, "members.0.job_id: 'x' is no job id"),
        ({"members": [{"job_id": "101"}, {"job_id": "101"}]}, "twice"),
        ({"members": [{"job_id": "101"}], "ordering": ["102"]}, "must hold each of the members"),
        ({"members": [{"job_id": "101", "solo_iteration_s": 0}]}, "greater than 0"),
        ({"members": [{"job_id": "101", "min_speed": 1}]}, "members.0.min_speed: 1 must be ≥ 0 and < 1"),
        ({"members": [{"job_id": "101", "steps": 2}]}, "members.0.steps: there is no such field"),
        ({"members": []}, "one at least"),
        ({"members": [{"job_id": "101"}], "python": "python3"}, "no path from the root"),
        ({"members": [{"job_id": str(each)} for each in range(5)], "discipline": "lockstep"}, "at most 4"),
    ],
)
def test_wrong_options_are_explained(launcher: Launcher, group: dict, message: str) -> None:
    command = [sys.executable, "-m", "muri.launcher.runtime.main", "--group", json.dumps(group)]
    result = subprocess.run(
        command, env=launcher.environment, check=False, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("discipline", ["fair", "lockstep"])
def test_members_with_unequal_iterations_all_make_progress(launcher: Launcher, discipline: str) -> None:
    script = launcher.script(
        """
        import sys, time
        import muri
        stage_s, stages, iterations = float(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])
        for step in range(iterations):
            for name in stages:
                with muri.stage(name):
                    time.sleep(stage_s)
        time.sleep(1.5)  # outside of stages: it must not hold the others up for ever
        with muri.stage("propagate"):
            print("done")
        """
    )
    members = {
        "101": ("0.02", "load,preprocess,propagate,synchronize", "20"),
        "102": ("0.002", "load,preprocess,propagate,synchronize", "60"),
        "103": ("0.005", "load,propagate", "40"),
        "104": ("0.001", "preprocess", "30"),
    }
    launcher.threads(*members, options=("--discipline", discipline))
    processes = {job: launcher.member(job, script, *arguments) for job, arguments in members.items()}
    for job, process in processes.items():
        assert ends(process) == 0, launcher.err(job)
        assert launcher.out(job) == "done\n"


def test_worker_processes_of_a_script_are_its_own(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import multiprocessing, os, sys
        import muri
        def work(number):
            with muri.stage("preprocess"):
                print("worker", number, os.environ["OWN"], flush=True)
            return number
        with muri.stage("preprocess"), multiprocessing.get_context("fork").Pool(2) as pool:
            print(sum(pool.map(work, range(3))))
        """
    )
    launcher.runtime("101")
    assert ends(launcher.member("101", script, OWN="mine")) == 0, launcher.err("101")
    assert sorted(launcher.out("101").split("\n")) == ["", "3", "worker 0 mine", "worker 1 mine", "worker 2 mine"]


def test_modules_of_the_same_name_are_the_members_own(launcher: Launcher) -> None:
    main = """
        import sys, time
        import helper.deep, model
        import muri
        model.counter += 1
        print(model.NAME, helper.deep.NAME)
        while not all(__import__("os").path.exists(f"../{name}/up") for name in sys.argv[1:]):
            open("up", "w").close()
            time.sleep(0.01)
        def later():
            import importlib
            import model
            from helper import deep
            return model.NAME, deep.NAME, importlib.import_module("helper.late").NAME, model.counter
        for _ in range(50):
            with muri.stage("load"):
                assert later() == (model.NAME, model.NAME, model.NAME, 1), later()
        print("same")
    """
    launcher.threads("101", "102")
    homes = []
    for name in ("one", "two"):
        home = launcher.script(main, folder=name).parent
        launcher.script(f"NAME = {name!r}\ncounter = 0\n", "model.py", folder=name)
        launcher.script("", "__init__.py", folder=f"{name}/helper")
        launcher.script("from .late import NAME\n", "deep.py", folder=f"{name}/helper")
        launcher.script("from model import NAME\n", "late.py", folder=f"{name}/helper")
        homes.append(home)
    processes = [
        launcher.member(job, "train.py", "one", "two", cwd=home)
        for job, home in zip(("101", "102"), homes, strict=True)
    ]
    assert [ends(process) for process in processes] == [0, 0], launcher.err("101") + launcher.err("102")
    assert launcher.out("101") == "one one\nsame\n"
    assert launcher.out("102") == "two two\nsame\n"


def test_a_signal_that_another_thread_takes_ends_the_runtime(launcher: Launcher) -> None:
    runtime = launcher.runtime("101")
    main = Path(f"/proc/{runtime.pid}")
    until(lambda: "pipe_read" in (main / "wchan").read_text(), "the main thread's wait")
    others = {int(task.name) for task in (main / "task").iterdir()} - {runtime.pid}
    ctypes.CDLL(None).tgkill(runtime.pid, others.pop(), int(signal.SIGTERM))
    assert ends(runtime) == 0
