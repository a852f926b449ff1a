"""Odd ways in which scripts signal and end: two members at once do each as plain Python does it."""

import re
import subprocess
import sys

import pytest
from launcher_harness import Launcher, ends
from polling import until

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
    import sys

    class Last:
        def __del__(self):
            print("last", sys is not None)

    last = Last()
    print(sys.stdout.mode, sys.stdout.name, sys.stderr.name, sys.stdin.mode, flush=True)
    sys.exit(300)
"""
MAIN_THREAD = """
    import os, signal, sys, threading
    main = threading.current_thread()
    print(main is threading.main_thread(), main.name)
    helper = threading.Thread(target=lambda: print(threading.main_thread() is main))
    helper.start()
    helper.join()
    signal.signal(signal.SIGUSR1, lambda number, _frame: print("at once", number))
    os.kill(os.getpid(), signal.SIGUSR1)
    print("after")
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(7))
    signal.raise_signal(signal.SIGTERM)
"""
UNBUFFERED = """
    import os, sys
    sys.stdout.write("a part of a line, ")
    os.write(1, b"and its end\\n")
    print("\\udcc3\\udca9", sys.stdout.write_through, sys.stdout.line_buffering)
"""
LOGGING = """
    import logging, logging.config, logging.handlers, sys, warnings
    kept = logging.handlers.MemoryHandler(100, target=logging.StreamHandler(sys.stdout))
    logging.getLogger("kept").addHandler(kept)
    logging.getLogger("kept").warning("kept until the end")
    logging.captureWarnings(True)
    warnings.warn("careful")
    logging.captureWarnings(False)
"""
TAKES_OVER = """
    import logging, logging.config, os, sys, time
    me, other = sys.argv[1:]
    handler = logging.FileHandler(f"{me}.log", mode="w")
    log = logging.getLogger("train")
    log.addHandler(handler)
    log.warning("first")
    open(f"{me}-ready", "w").close()
    while not os.path.exists(f"{other}-ready"):
        time.sleep(0.01)
    if me == "101":
        logging.config.dictConfig({"version": 1})
        logging.shutdown()
        open("done", "w").close()
    while not os.path.exists("done"):
        time.sleep(0.01)
    log.warning("second")
"""


def test_configuring_logging_closes_nobody_elses_files(launcher: Launcher) -> None:
    script = launcher.script(TAKES_OVER)
    launcher.threads("101", "102")
    processes = [launcher.member(a, script, a, b) for a, b in (("101", "102"), ("102", "101"))]
    assert [ends(process) for process in processes] == [0, 0], launcher.err("101")
    assert (launcher.folder / "102.log").read_text() == "first\nsecond\n"


def _as_alone(launcher: Launcher, text: str, **environment: str) -> None:
    """Two members at once say and return what plain Python does."""
    script = launcher.script(text)
    launcher.threads("101", "102")
    processes = [launcher.member(job, script, **environment) for job in ("101", "102")]
    variables = launcher.environment | environment
    alone = subprocess.run(
        [sys.executable, script], check=False, capture_output=True, env=variables, stdin=subprocess.DEVNULL
    )
    expected = (alone.stdout.decode(), re.sub("0x[0-9a-f]+", "0x", alone.stderr.decode()), alone.returncode)
    for job, process in zip(("101", "102"), processes, strict=True):
        code = ends(process)
        assert (launcher.out(job), re.sub("0x[0-9a-f]+", "0x", launcher.err(job)), code) == expected


@pytest.mark.parametrize("script", [EXIT_FUNCTIONS, IN_A_THREAD, LAST_WORDS, LOGGING, MAIN_THREAD, UNBUFFERED])
def test_ends_are_as_alone(launcher: Launcher, script: str) -> None:
    _as_alone(launcher, script, PYTHONUNBUFFERED="1", LC_ALL="C")


def test_an_error_of_syntax_shows_no_frame_of_the_launcher(launcher: Launcher) -> None:
    script = launcher.script("print('x'\n")
    launcher.threads("101")
    assert ends(launcher.member("101", script, MURI_ISOLATION="process")) == 1
    alone = subprocess.run([sys.executable, script], check=False, capture_output=True)
    assert launcher.err("101") == alone.stderr.decode()


CANNOT_BE_FORGOTTEN = """
    from muri.launcher import isolation
    def forget(session):
        raise RuntimeError("no way to forget")
    isolation.forget = forget
    raise SystemExit(3)
"""


def test_the_end_of_a_script_is_told_even_if_cleaning_up_after_it_fails(launcher: Launcher) -> None:
    launcher.threads("101")
    assert ends(launcher.member("101", launcher.script(CANNOT_BE_FORGOTTEN))) == 3
    until(lambda: "no way to forget" in (launcher.folder / "runtime.log").read_text(), "the runtime's log")


OPEN_POOL = """
    import sys, time
    from concurrent.futures import ThreadPoolExecutor
    pool = ThreadPoolExecutor(2)
    print(pool.submit(pow, 2, 10).result())
    pool.submit(lambda: (time.sleep(0.2), print("the pool's last work", flush=True)))
    print("last line", flush=True)
"""


def test_a_pool_of_threads_that_is_never_shut_down_does_its_work_and_ends(launcher: Launcher) -> None:
    _as_alone(launcher, OPEN_POOL)
