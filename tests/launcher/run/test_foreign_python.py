"""Scripts under a Python of the user's own, which has PyTorch but neither Muri nor what Muri is made with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from group_words import runtime_words
from launcher_harness import Launcher, ends
from polling import DEADLINE_S, until

from muri.errors import UsageError
from muri.pythons import library_dir, of_members, own_python, script_python, with_library

SCRIPT = """
    import sys
    import muri, torch
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(30):
        with muri.stage("load"):
            batch = torch.ones(2, 4)
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    print(sys.prefix, "click" in sys.modules, "pydantic" in sys.modules)
    sys.exit(3)
"""


@pytest.fixture
def own(foreign_python: Path, launcher: Launcher) -> Path:
    """The user's Python; members are told of it."""
    launcher.warm = False
    launcher.environment["MURI_PYTHON"] = str(foreign_python)
    return foreign_python


def runtime_under(python: Path, launcher: Launcher, *members: str) -> None:
    """Start a runtime as a pilot does it where members have a Python of their own."""
    command = [str(python), "-m", "muri.launcher.runtime.main", "--status-file", str(launcher.status_path)]
    log = launcher.folder / "runtime.log"
    command += runtime_words(members, ("--isolation", "thread"))
    environment = of_members(launcher.environment)
    launcher.give_grant()
    process = launcher.spawn(command, environment, stderr=log.open("wb"), cwd=launcher.folder)
    until(lambda: process.poll() is not None or launcher.status_path.exists(), "the runtime")
    assert process.poll() is None, log.read_text()


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.thorough)])
def test_members_share_a_runtime_under_it(launcher: Launcher, own: Path, isolation: str) -> None:
    runtime_under(own, launcher, "101", "102")
    script = launcher.script(SCRIPT)
    members = {job: launcher.member(job, "--isolation", isolation, script) for job in ("101", "102")}
    for job, process in members.items():
        assert ends(process) == 3, launcher.err(job) + (launcher.folder / "runtime.log").read_text()
        assert launcher.out(job).split() == [str(own.parent.parent), "False", "False"]


def test_members_of_two_pythons_share_a_runtime_that_has_neither_and_loads_no_pytorch(
    launcher: Launcher, foreign_python: Path
) -> None:
    launcher.warm = False
    runtime = launcher.runtime("101", "102", options=("--preload", "torch"))
    script = launcher.script(SCRIPT)
    own = launcher.member("101", script, MURI_PYTHON=str(foreign_python))
    other = launcher.member("102", script)
    assert [ends(own), ends(other)] == [3, 3], launcher.err("101")
    assert launcher.out("101").split()[0] == str(foreign_python.parent.parent)
    assert launcher.out("102").split()[0] == sys.prefix
    mapped = Path(f"/proc/{runtime.pid}/maps").read_text()
    assert "libpython" in mapped or "python3" in mapped
    assert "torch" not in mapped


def test_an_older_python_is_refused_where_muri_is_needed_in_it(launcher: Launcher, tmp_path: Path) -> None:
    older = tmp_path / "python3"
    older.write_text("""#!/bin/sh\ncase "$1" in -c) echo '["/old", "3.7.2", [3, 7]]';; *) echo "plain $*";; esac\n""")
    older.chmod(0o755)
    launcher.environment["MURI_PYTHON"] = str(older)
    script = launcher.script("print('never')")
    assert launcher.ran(None, script, "7") == f"plain {script} 7\n"
    assert ends(launcher.member(None, "--timing", script)) == 2
    assert "Python 3.7; Muri needs 3.8" in launcher.err(None)


def test_the_python_that_is_named_goes_first(foreign_python: Path) -> None:
    found = script_python({"MURI_PYTHON": str(foreign_python)})
    assert (found.executable, found.prefix) == (str(foreign_python), str(foreign_python.parent.parent))
    assert not found.is_own
    assert script_python({"PATH": str(foreign_python.parent)}) == own_python()  # Muri is installed in this one
    for wrong in ("/nowhere/python", "/bin/false"):
        with pytest.raises(UsageError, match=wrong):
            script_python({"MURI_PYTHON": wrong})


def test_a_muri_of_its_own_environment_leaves_scripts_to_the_first_python_in_path(
    foreign_python: Path, tmp_path: Path
) -> None:
    """As packages install it: found through PYTHONPATH, in a Python that holds nothing of it."""
    code = "import os; from muri.pythons import script_python; print(script_python(os.environ).executable)"
    environment = with_library({**os.environ, "PATH": f"{foreign_python.parent}:/usr/bin:/bin"})
    private = Path(sys.executable).resolve()  # without this checkout's environment
    beside = tmp_path / "lib"
    (beside / "muri-1.dist-info").mkdir(parents=True)
    named = environment | {"PYTHONPATH": f"{environment['PYTHONPATH']}:{beside}"}
    for variables in (environment, named):
        told = subprocess.check_output([private, "-c", code], env=variables, cwd="/", text=True, timeout=DEADLINE_S)
        assert told.strip() == str(foreign_python)


def test_the_library_holds_muri_alone_and_stays_first() -> None:
    assert [path.name for path in library_dir().iterdir() if path.name != "__pycache__"] == ["muri"]
    once = with_library({"PYTHONPATH": "/a:/b"})
    assert once["PYTHONPATH"] == f"{library_dir()}:/a:/b"
    assert with_library(once) == once
    assert with_library({}) == {"PYTHONPATH": str(library_dir()), "MURI_OWN_PYTHON": sys.executable}


def test_a_runtime_gets_the_members_variables_and_the_pilot_does_not() -> None:
    given = {"PATH": "/bin", "MURI_MEMBERS_LD_LIBRARY_PATH": "/opt/cuda", "MURI_MEMBERS_PYTHONPATH": "/home/alice/lib"}
    assert of_members(given) == {
        "PATH": "/bin", "LD_LIBRARY_PATH": "/opt/cuda", "PYTHONPATH": f"{library_dir()}:/home/alice/lib",
        "MURI_OWN_PYTHON": sys.executable,
    }  # fmt: skip
