"""`muri run` takes the command line of Python: its options, its forms of a program, and `python` itself."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import click
import pytest
from launcher_harness import MURI, Launcher
from polling import DEADLINE_S

from muri.errors import UsageError
from muri.launcher.run.command import PythonLine, _AsPython, read_line, run
from muri.profiler.dryrun.messages import ITERATION_LOG_VARIABLE

SEEN = """
import sys
LEFT_OUT = ("__loader__", "__spec__", "__builtins__")
print(__spec__ and __spec__.name)
print(sys.argv, sys.path, sys.flags, sys.warnoptions, sys._xoptions, sys.stdout.write_through, __debug__)
print({name: value for name, value in sorted(globals().items()) if name not in LEFT_OUT})
print(sys.stdin.read())
1 / 0
"""
LINES = (
    "-u train.py -x --timing -",
    "-BOOPqbbd -R -s ./train.py",
    "-W error::ImportWarning -Wignore::ResourceWarning -X dev -Xutf8=0 train.py -c",
    "-uOm package.train -m -h",
    "-BmPACKAGELESS",
    "-Oc CODE -c - -m",
    "-X dev - -c -u",
)
WORDS = [[SEEN if word == "CODE" else word.replace("PACKAGELESS", "train") for word in line.split()] for line in LINES]


def ran(command: list[str], launcher: Launcher, words: list[str], **variables: str) -> tuple[str, list[str], int]:
    """Return a command's output and its exit code."""
    done = subprocess.run(
        [*command, *words], cwd=launcher.folder, env=launcher.environment | variables, check=False,
        capture_output=True, text=True, timeout=DEADLINE_S, input=SEEN,
    )  # fmt: skip
    # Python's traceback of a module begins in the library that runs it.
    errors = [line for line in done.stderr.splitlines() if "<frozen runpy>" not in line]
    return done.stdout, errors, done.returncode


@pytest.fixture
def scripts(launcher: Launcher) -> Launcher:
    """A script and the same as a module."""
    launcher.warm = False
    launcher.script(SEEN)
    launcher.script(SEEN, folder="package")
    return launcher


@pytest.mark.parametrize("words", WORDS, ids=LINES)
def test_a_line_means_what_it_means_to_python(scripts: Launcher, words: list[str]) -> None:
    plain = ran([sys.executable], scripts, words)
    assert plain[2] == 1, plain
    assert "ZeroDivisionError" in plain[1][-1]
    assert ran([*MURI, "run"], scripts, words) == plain
    assert ran([*MURI, "run"], scripts, ["python", *words], MURI_PYTHON=sys.executable) == plain
    assert ran([*MURI, "run"], scripts, [sys.executable, *words]) == plain
    assert ran([*MURI, "run"], scripts, words, **{ITERATION_LOG_VARIABLE: "/dev/null"}) == plain, "under the runner"


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_in_a_group_too(scripts: Launcher, isolation: str) -> None:
    """A thread cannot have options of its own, so such a script has its own process there."""
    scripts.runtime("101", options=("--isolation", isolation))
    for words in WORDS:
        assert ran([*MURI, "run"], scripts, words, SLURM_JOB_ID="101") == ran([sys.executable], scripts, words)


def console_script(path: Path, shebang: str, *more: str) -> None:
    path.write_text("\n".join((f"#!{shebang}", *more, "import sys", "print(sys.argv, sys.executable)")))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_python_program_of_path_runs_under_its_own_python(launcher: Launcher, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, lines in {
        "direct": [sys.executable],
        "options": [f"{sys.executable} -s"],
        "by-env": ["/usr/bin/env python9"],
        "long-path": ["/bin/sh", f'\'\'\'exec\' "{sys.executable}" "$0" "$@"', "' '''"],
    }.items():
        console_script(programs / name, *lines)
    (programs / "python9").symlink_to(sys.executable)
    (launcher.folder / "direct").mkdir()
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    for name in ("direct", "options", "by-env", "long-path"):
        said = ran([*MURI, "run"], launcher, [name, "--nproc", "2"], **path)
        assert said == ran([str(programs / name)], launcher, ["--nproc", "2"], **path)
        assert said[2] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nowhere.py", "there is no script nowhere.py; give its path"),
        ("sh train.sh", "/sh is not a Python program; call it without `muri run`"),
        ("notes.ipynb", "notes.ipynb is a notebook; make a script of it first: jupyter nbconvert --to script notes.ip"),
    ],
)
def test_what_is_no_script_is_refused(words: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_line(words.split(), {"--trace"}, {"--timing"})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-E train.py", "muri run takes no -E: Muri reaches a script's Python through PYTHONPATH"),
        ("-ui train.py", "muri run takes no -i: a job has no terminal"),
        ("-V", "No such option '-V'"),
        ("--tming train.py", "No such option '--tming'"),
        ("python --timing train.py", "Option --timing must stand before Python's own"),
        ("-u --timing train.py", "Option --timing must stand before Python's own"),
        ("-W", "Option '-W' requires an argument"),
        ("-um", "Option '-m' requires an argument"),
    ],
)
def test_options_that_cannot_be_had_are_refused(words: str, said: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        read_line(words.split(), {"--trace"}, {"--timing"})
    assert said in caught.value.format_message()


def test_own_options_stand_before_the_program() -> None:
    own = ("--timing", "--trace", "t.json", "--trace=u.json")
    line = read_line([*own, "-u", "-B", "-", "--timing", "-u"], {"--trace"}, {"--timing"})
    assert line == PythonLine(own, ("-u", "-B"), False, "-", ("--timing", "-u"))
    assert isinstance(run, _AsPython)


def test_a_trace_to_nowhere_is_refused_before_the_script_starts(launcher: Launcher) -> None:
    launcher.script("print('started')")
    said = ran([*MURI, "run"], launcher, ["--trace", "/nodir/t.json", "train.py"])
    assert said == ("", ["muri: cannot write the trace /nodir/t.json: there is not a directory /nodir"], 2)
    assert ran([*MURI, "run"], launcher, ["train.py"], MURI_TRACE=str(launcher.folder / "train.py" / "t"))[0] == ""
