"""Odd ways in which scripts signal and end: two members at once do each as plain Python does it."""

import re
import subprocess
import sys

import pytest
from launcher_harness import Launcher, ends
from polling import until
from two_members import run_both

EXIT_FUNCTIONS = """
    import atexit, sys

    def fails(value):
        print("called with", value)
        1 / 0

    def leaves():
        sys.exit(9)

    atexit.register(fails, 3)
    atexit.register(leaves)
    sys.exit(4)
"""
IN_A_THREAD = """
    import os, threading, time
    threading.Timer(0.1, lambda: os._exit(9)).start()
    time.sleep(60)
    print("not reached")
"""
LAST_WORDS = """
    import sys  # run UNBUFFERED

    class Last:
        def __del__(self):
            print("last", sys is not None)

    last = Last()
    print(sys.stdout.mode, sys.stdout.name, sys.stderr.name, sys.stdin.mode, flush=True)
    sys.exit(300)
"""
MAIN_THREAD = """
    import threading
    main = threading.current_thread()
    print(main is threading.main_thread(), main.name)
    helper = threading.Thread(target=lambda: print(threading.main_thread() is main))
    helper.start()
    helper.join()
"""
UNBUFFERED_OUTPUT = """
    import os, sys  # run UNBUFFERED
    sys.stdout.write("a part of a line, ")
    os.write(1, b"and its end\\n")
    print("\\udcc3\\udca9", sys.stdout.write_through, sys.stdout.line_buffering)
"""
LOGGING = """
    import logging, logging.config, logging.handlers, sys, warnings
    kept = logging.handlers.MemoryHandler(100, target=logging.StreamHandler(sys.stdout))
    logging.getLogger("kept").addHandler(kept)
    logging.getLogger("kept").warning("kept until the end")
    warnings.warn("careful")
"""


def test_configuring_logging_closes_nobody_elses_files(launcher: Launcher) -> None:
    code = """
        import logging, logging.config
        log = logging.getLogger("train")
        log.addHandler(logging.FileHandler(f"{me}.log", mode="w"))
        log.warning("first")
        meet("ready")
        if me == "101":
            logging.config.dictConfig({"version": 1})
            logging.shutdown()
        meet("done")
        log.warning("second")
    """
    run_both(launcher, code)
    assert (launcher.folder / "102.log").read_text() == "first\nsecond\n"


OPEN_POOL = """
    import sys, threading, time
    from concurrent.futures import ThreadPoolExecutor
    pool, last_line = ThreadPoolExecutor(2), threading.Event()
    print(pool.submit(pow, 2, 10).result())
    pool.submit(lambda: (last_line.wait(), time.sleep(0.1), print("the pool's last work", flush=True)))
    print("last line", flush=True)
    last_line.set()
"""
WAITING_THREAD = """
    import atexit, pickle, threading, time
    class Model: pass
    assert type(pickle.loads(pickle.dumps(Model()))) is Model
    atexit.register(print, "exit function")
    last_line = threading.Event()
    threading.Thread(target=lambda: (last_line.wait(), time.sleep(0.1), print("thread done"))).start()
    print("main done")
    last_line.set()
"""
SCRIPTS = (
    *(EXIT_FUNCTIONS, IN_A_THREAD, LAST_WORDS, LOGGING, MAIN_THREAD, UNBUFFERED_OUTPUT, OPEN_POOL, WAITING_THREAD),
    *("", "import sys; sys.exit(3)", "import sys; sys.exit()", "import sys; sys.exit('no data')"),
    *("import sys; sys.exit(259)", "import os; os._exit(7)", "raise KeyboardInterrupt", "raise MemoryError", "x =\n"),
    "def f():\n    raise ValueError('bad')\nf()\n",
    "import helper\n",
    "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error\n",
    "import muri\nmuri.stage('sync')\n",
)
DEADLY = (
    "import os; os.abort()",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "import ctypes; ctypes.string_at(0)",
)


@pytest.mark.parametrize(("isolation", "texts"), [("thread", SCRIPTS), ("process", SCRIPTS + DEADLY)])
def test_ends_and_last_words_are_as_alone(launcher: Launcher, isolation: str, texts: tuple[str, ...]) -> None:
    launcher.warm = isolation == "thread"  # a process that has its end for itself is plain Python's
    launcher.script("import no_such_module\n", "helper.py")
    scripts = {str(101 + number): launcher.script(text, f"{101 + number}.py") for number, text in enumerate(texts)}
    special = {"PYTHONUNBUFFERED": "1", "LC_ALL": "C"}
    variables = {job: special if "UNBUFFERED" in script.read_text() else {} for job, script in scripts.items()}
    launcher.runtime(*scripts, options=("--isolation", isolation))
    members = {job: launcher.member(job, script.name, **variables[job]) for job, script in scripts.items()}
    for job, script in scripts.items():
        command = [sys.executable, script.name]
        environment = launcher.environment | variables[job]
        alone = subprocess.run(
            command, check=False, capture_output=True, cwd=launcher.folder, env=environment, stdin=subprocess.DEVNULL
        )
        code = 128 - alone.returncode if isolation == "thread" and alone.returncode < 0 else alone.returncode
        expected = (code, alone.stdout.decode(), re.sub("0x[0-9a-f]+", "0x", alone.stderr.decode()))
        found = (ends(members[job]), launcher.out(job), re.sub("0x[0-9a-f]+", "0x", launcher.err(job)))
        assert found == expected, script.read_text()


CANNOT_BE_FORGOTTEN = """
    from muri.launcher.shared_process import thread_session
    def forget(session):
        raise RuntimeError("no way to forget")
    thread_session.forget = forget
    raise SystemExit(3)
"""


def test_the_end_of_a_script_is_told_even_if_cleaning_up_after_it_fails(launcher: Launcher) -> None:
    launcher.threads("101")
    launcher.ran("101", launcher.script(CANNOT_BE_FORGOTTEN), code=3)
    until(lambda: "no way to forget" in (launcher.folder / "runtime.log").read_text(), "the runtime's log")
