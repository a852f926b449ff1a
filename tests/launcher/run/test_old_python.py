"""Scripts under Pythons older and newer than Muri's own: what runs in their processes, without PyTorch."""

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest
from launcher_harness import Launcher, ends
from polling import DEADLINE_S

from muri.launcher import process_gate
from muri.launcher.arbitration.disciplines import FairArbiter
from muri.launcher.job.stage_clock import IterationRecord
from muri.launcher.sessions.process_session import Channels
from muri.profiler.records import STAGES
from muri.pythons import with_library

SCRIPTS = Path(__file__).parents[3] / "scripts"
PYENV = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
ASK = "import sys; print(*sys.version_info[:2])"


@pytest.fixture(scope="session")
def pythons() -> tuple[str, str]:
    """One that is older than Muri's own, and the newest one of this machine."""
    old = subprocess.check_output([SCRIPTS / "install-old-python"], text=True).strip()
    named = filter(None, (shutil.which(f"python3.{minor}") for minor in range(20)))
    releases = {}
    for path in [old, *named, *map(str, PYENV.glob("versions/3.*/bin/python3"))]:
        done = subprocess.run([path, "-c", ASK], capture_output=True, text=True, check=False)
        if done.returncode == 0:  # pyenv's placeholders for Pythons that are not chosen do not start
            releases[tuple(map(int, done.stdout.split()))] = path
    return old, releases[max(releases)]


SCRIPT = """
    import sys, time
    import muri

    class Samples:
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return index

    def worked():
        with muri.stage("preprocess"):
            return sum(range(2000))

    samples, place = muri.cache(Samples(), gib=0.01), muri.checkpoint(lambda path: path.write_text("7"), print)
    for batch in muri.batches([samples[index] for index in range(40)], prefetch=1):
        worked()
        with muri.stage("propagate"):
            muri.yield_point()
            time.sleep(0.002)
            if batch == 3 and "stop" in sys.argv:
                import os, signal
                os.kill(os.getpid(), signal.SIGUSR1)
    print(sys.version_info[:2], batch, "click" in sys.modules)
    sys.exit(3)
"""


@pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.thorough)], ids=["oldest", "newest"])
def python(request: pytest.FixtureRequest, pythons: tuple[str, str], launcher: Launcher) -> str:
    """A Python in which scripts of this test's launcher run."""
    found = pythons[request.param]
    launcher.environment["MURI_PYTHON"] = found
    return found


def release(python: str) -> str:
    """What the script prints of it."""
    return subprocess.check_output([python, "-c", "import sys; print(sys.version_info[:2])"], text=True).strip()


def test_a_script_runs_alone_with_its_stages(launcher: Launcher, python: str) -> None:
    trace = launcher.folder / "trace.json"
    out = launcher.ran(None, "--timing", "--trace", trace, launcher.script(SCRIPT), code=3)
    assert out == f"{release(python)} 39 False\n"
    assert "40 iterations" in launcher.err(None)
    assert {"load", "preprocess", "propagate"} <= {event["name"] for event in json.loads(trace.read_text())}


def test_a_dry_run_measures_it(launcher: Launcher, python: str) -> None:
    _code, found = launcher.dry_run("auto:12:5", launcher.script(SCRIPT))
    assert found["python"]["executable"] == python, found
    assert found["iterations"] >= 5, (found, launcher.err(None))
    assert found["propagate_s"] >= 0.002


def test_a_saved_script_asks_for_its_requeue_through_muris_own_python(launcher: Launcher, python: str) -> None:
    """No Slurm answers here; the error is that of a module which only Muri's own Python can import."""
    places = {"MURI_CHECKPOINT_DIR": str(launcher.folder / "saved"), "PATH": str(launcher.folder)}
    variables = {"MURI_JOB": "model=m,checkpoint=1", "MURI_TIMING": "1", **places}
    ends(launcher.member("101", "--no-attach", launcher.script(SCRIPT), "stop", **variables))
    assert "muri: saved at iteration" in launcher.err("101")
    assert "job 101 was saved but could not be requeued: " in launcher.err("101")
    assert "squeue" in launcher.err("101")


def test_a_member_asks_the_arbiter_for_its_stages(launcher: Launcher, python: str) -> None:
    arbiter, records = FairArbiter(), list[IterationRecord]()
    arbiter.join("101")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    page_fd, _page = process_gate.make_page()
    channels = Channels("101", arbiter, records.append, None, Mock())
    channels.open(ours)
    # The variable names the process that it is meant for, so the shell that knows its own number becomes that one.
    gate = f"{process_gate.VARIABLE}=$$:{theirs.fileno()}:{page_fd}:0"
    command = ["sh", "-c", f'{gate} exec "$0" -m muri.launcher.script.solo "$1"', python, str(launcher.script(SCRIPT))]
    ended = subprocess.run(
        command, env=with_library(launcher.environment), pass_fds=[theirs.fileno(), page_fd], capture_output=True,
        text=True, timeout=DEADLINE_S, cwd=launcher.folder, check=False,
    )  # fmt: skip
    theirs.close()
    assert ended.returncode == 3, ended.stderr
    channels.close(DEADLINE_S)
    assert len(records) == 40
    assert min(record.stage_s[STAGES.index("propagate")] for record in records) >= 0.002
