"""Every command in the hands of an ordinary user, on hosts where something is missing: a message, never a traceback."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
import pytest
from muri_cluster import MuriCluster

from muri.cli import cli
from sandbox import daemons
from sandbox.driver import Driver

COMMANDS = {
    "run": "/home/alice/missing.py",
    "queue": "",
    "top": "--once",
    "timeline": "/missing.json",
    "explain": "1",
    "report": "1",
    "plan": "--snapshot /missing.json",
    "snapshot": "",
    "doctor": "",
    "preempt": "1 --yes",
    "drain": "",
    "setup": "--check",
    "profile list": "",
    "profile show": "m",
    "profile compare": "m n",
    "profile run": "-- /home/alice/missing.py",
    "profile sensitivity": "--show m",
    "profile bandwidth": "--gpus 1",
    "profile predict": "m",
    "profile pair": "/home/alice/missing.py /home/alice/missing.py",
    "profile fit": "m",
    "profile fit-slowdown": "gpu",
    "profile edit": "m --load-s 1",
    "profile audit": "",
    "profile stale": "m",
    "profile stats": "",
    "profile rm": "m --yes",
    "profile publish": "m --yes",
    "profile unpublish": "m --yes",
    "profile export": "",
    "profile import": "/missing.json",
    "trace check": "/missing.csv",
    "trace generate": "--jobs 3 --gpus 4 --output /proc/missing.csv",
    "trace import": "/missing.csv",
    "trace show": "/missing.csv",
    "policies": "",
    "simulate": "/missing.csv --policy muri-s",
    "config check": "",
    "config show": "",
    "completion": "bash",
    "controller": "--once",
}
"""Each command with arguments that an ordinary user might give."""

#: Those that work on any host, whatever is missing there.
ANYWHERE = {"policies", "completion"}

#: Those that must fail wherever an ordinary user gives them: for root alone, or asked about what is not there.
NEVER = {
    "run", "timeline", "plan", "top", "explain", "report", "preempt", "drain", "profile show", "profile compare",
    "profile edit", "profile rm", "profile publish", "profile unpublish", "profile import", "trace check",
    "trace import", "trace show", "simulate", "controller",
}  # fmt: skip
NEED_SLURM = {"queue", "snapshot"}
NEED_CONFIG = {"queue", "snapshot", "config check", "config show"}

_RUN_ALL = """
import json, os, sys, tempfile
from muri.cli import cli
from muri.commands import run_command

def start(name, arguments):
    printed, said = (tempfile.TemporaryFile("w+") for _ in range(2))
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(printed.fileno(), 1)
        os.dup2(said.fileno(), 2)
        sys.exit(run_command(cli, [*name.split(), *arguments.split()]))
    return name, child, printed, said

def ended(name, child, *files):
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for file in files:
        file.seek(0)
    return name, code, *(file.read() for file in files)

import muri.slurm_plugin.cli.doctor, muri.simulator.cli.simulate_command, muri.profiler.commands.look  # once for all
items = list(json.load(sys.stdin).items())
told = []
for first in range(0, len(items), 10):  # Slurm's commands wait long for a slurmctld that is down
    told += [ended(*each) for each in [start(*item) for item in items[first : first + 10]]]
print(json.dumps(told))
"""


def test_the_list_of_commands_is_complete() -> None:
    def names(command: click.Command, path: str = "") -> Iterator[str]:
        if not isinstance(command, click.Group):
            yield path.strip()
            return
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from names(child, f"{path} {name}")

    assert set(names(cli)) == set(COMMANDS)


@pytest.fixture
def muri(one_gpu: Driver) -> MuriCluster:
    muri = MuriCluster(one_gpu)
    muri.cycle()
    return muri


@contextmanager
def no_rights(muri: MuriCluster) -> Iterator[dict[str, str]]:
    """The state directory is there, and closed to users."""
    yield {}


@contextmanager
def no_state_directory(muri: MuriCluster) -> Iterator[dict[str, str]]:
    yield {"MURI_STATE_DIR": "/var/lib/none", "MURI_STATUS_DIR": "/var/lib/none/status", "MURI_CONFIG": "/dev/null"}


@contextmanager
def closed_configuration(muri: MuriCluster) -> Iterator[dict[str, str]]:
    muri.driver.run("chmod", "700", "/etc/muri", user="root")
    try:
        yield {}
    finally:
        muri.driver.run("chmod", "755", "/etc/muri", user="root")


@contextmanager
def no_slurm(muri: MuriCluster) -> Iterator[dict[str, str]]:
    """Neither Slurm's commands nor pyslurm."""
    python = muri.driver.run("python", "-c", "import sys; print(sys.prefix)").stdout.strip()
    yield {"PATH": f"{python}/bin", "PYTHONPATH": ""}


@contextmanager
def slurmctld_down(muri: MuriCluster) -> Iterator[dict[str, str]]:
    daemons.stop_controller(muri.driver.instance)
    try:
        yield {}
    finally:
        muri.driver.restart_controller()


CONDITIONS = [
    (no_rights, NEVER),
    (no_state_directory, NEVER),
    (closed_configuration, NEVER | NEED_CONFIG),
    (no_slurm, NEVER | NEED_SLURM),
    (slurmctld_down, NEVER | NEED_SLURM),
]


@pytest.mark.parametrize(("condition", "must_fail"), CONDITIONS)
def test_ordinary_users_get_messages(
    muri: MuriCluster, condition: Callable[[MuriCluster], contextmanager], must_fail: set[str]
) -> None:
    with condition(muri) as environment:
        run = muri.driver.run("python", "-c", _RUN_ALL, env=environment, stdin=json.dumps(COMMANDS), timeout_s=1200)
    codes = {}
    for name, code, printed, said in json.loads(run.stdout):
        assert "Traceback" not in printed + said, f"{name}: {said}"
        assert code == 0 or name == "doctor" or said.strip(), f"{name} fails without a word"
        codes[name] = code
    assert {name for name in must_fail if codes[name] == 0} == set()
    assert {name for name in ANYWHERE if codes[name] != 0} == set()


@pytest.mark.parametrize("mode", ["--once", "--interval 1"])
def test_the_controller_refuses_to_run_as_slurmuser_and_leaves_nothing_in_roots_way(one_gpu: Driver, mode: str) -> None:
    muri = MuriCluster(one_gpu)
    as_slurm = ("setpriv", "--reuid=slurm", "--regid=slurm", "--clear-groups", "muri-controller", *mode.split())
    for _ in range(2):  # before root's first cycle, and when root's lock file is there
        refused = muri.driver.run(*as_slurm, user="root", check=False)
        assert refused.returncode == 2
        assert refused.stderr.startswith("muri: muri-controller must run as root, not as slurm")
        assert "Traceback" not in refused.stderr
        muri.cycle()
    owners = muri.driver.run("stat", "-c", "%U", muri.state_dir, f"{muri.state_dir}/controller.lock", user="root")
    assert owners.stdout.split() == ["root", "root"]
