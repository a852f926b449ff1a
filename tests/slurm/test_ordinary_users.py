"""Every command in the hands of an ordinary user, on hosts where something is missing: a message, never a traceback."""

import json

import click
import pytest
from muri_cluster import MuriCluster

from muri.cli import cli
from muri.commands import with_commands_below
from sandbox.support import CHECKOUT

COMMANDS = {
    "run": "/home/alice/missing.py",
    "queue": "",
    "top": "--once",
    "explain": "1",
    "report": "1",
    "plan": "--snapshot /missing.json",
    "doctor": "",
    "preempt": "1 --yes",
    "drain": "",
    "profile list": "",
    "profile show": "m",
    "profile run": "-- /home/alice/missing.py",
    "profile set": "m load_ms=1",
    "profile rm": "m --yes",
    "profile publish": "m --yes",
    "profile export": "",
    "profile import": "/missing.json",
    "trace check": "/missing.csv",
    "trace generate": "--jobs 3 --gpus 4 --output /proc/missing.csv",
    "trace import": "/missing.csv",
    "policies": "",
    "simulate": "/missing.csv --policy muri-s",
    "config check": "",
}
"""Each command with arguments that an ordinary user might give."""

#: Those that work on any host, whatever is missing there.
ANYWHERE = {"policies"}

#: Those that must fail wherever an ordinary user gives them: for root alone, or asked about what is not there.
NEVER = {
    "run", "plan", "top", "explain", "report", "preempt", "drain", "profile show",
    "profile set", "profile rm", "profile publish", "profile import", "trace check",
    "trace import", "simulate",
}  # fmt: skip
NEED_SLURM = {"queue"}
NEED_CONFIG = {"queue", "config check"}

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

import muri.slurm_plugin.cli.doctor, muri_lab.sweep.command, muri.profiler.commands.stored  # once for all
items = list(json.load(sys.stdin).items())
told = []
for first in range(0, len(items), 10):  # Slurm's commands try for a while to reach a slurmctld
    told += [ended(*each) for each in [start(*item) for item in items[first : first + 10]]]
print(json.dumps(told))
"""


def test_the_list_of_commands_is_complete() -> None:
    found = with_commands_below(cli, click.Context(cli, info_name="muri"))
    names = {context.command_path for command, context in found if not isinstance(command, click.Group)}
    assert names == {f"muri {name}" for name in COMMANDS}


#: No slurmctld answers, as Slurm's commands see it; how long they try again depends on the two timeouts.
NO_SLURMCTLD = "s/^SlurmctldPort=.*/SlurmctldPort=1/;s/^(SlurmctldTimeout|MessageTimeout)=.*/\\1=4/"

#: What root does before, the users' environment, and what must fail then.
CONDITIONS: dict[str, tuple[str, dict[str, str], set[str]]] = {
    "a state directory that is closed to users": ("true", {}, NEVER),
    "no state directory": (
        "true",
        {"MURI_STATE_DIR": "/var/lib/none", "MURI_STATUS_DIR": "/var/lib/none/status", "MURI_CONFIG": "/dev/null"},
        NEVER,
    ),
    "a closed configuration": ("chmod 700 /etc/muri", {}, NEVER | NEED_CONFIG),
    "neither Slurm's commands nor pyslurm": (
        "true", {"PATH": f"{CHECKOUT}/.venv/bin", "PYTHONPATH": ""}, NEVER | NEED_SLURM
    ),
    "no slurmctld": (
        f"rm -rf /tmp/away; cp -r /etc/slurm /tmp/away; sed -i -E '{NO_SLURMCTLD}' /tmp/away/slurm.conf",
        {"SLURM_CONF": "/tmp/away/slurm.conf"},
        NEVER | NEED_SLURM,
    ),
}  # fmt: skip


@pytest.mark.parametrize("condition", CONDITIONS)
def test_ordinary_users_get_messages(muri: MuriCluster, condition: str) -> None:
    muri.cycle()
    before, environment, must_fail = CONDITIONS[condition]
    muri.driver.run("sh", "-c", before, user="root")
    try:
        run = muri.driver.run("python", "-c", _RUN_ALL, env=environment, stdin=json.dumps(COMMANDS), timeout_s=1200)
    finally:
        muri.driver.run("chmod", "755", "/etc/muri", user="root")
    codes = {}
    for name, code, printed, said in json.loads(run.stdout):
        assert "Traceback" not in printed + said, f"{name}: {said}"
        assert code == 0 or name == "doctor" or said.strip(), f"{name} fails without a word"
        codes[name] = code
    assert {name for name in must_fail if codes[name] == 0} == set()
    assert {name for name in ANYWHERE if codes[name] != 0} == set()


def test_the_controller_refuses_to_run_as_slurmuser_and_leaves_nothing_in_roots_way(muri: MuriCluster) -> None:
    as_slurm = ("setpriv", "--reuid=slurm", "--regid=slurm", "--clear-groups", "muri-controller")
    for mode in ("--once", "--interval 1"):  # before root's first cycle, and when root's lock file is there
        refused = muri.driver.run(*as_slurm, *mode.split(), user="root", check=False)
        assert refused.returncode == 2
        assert refused.stderr.startswith("muri: muri-controller must run as root, not as slurm")
        assert "Traceback" not in refused.stderr
        muri.cycle()
    owners = muri.driver.run("stat", "-c", "%U", muri.state_dir, f"{muri.state_dir}/controller.lock", user="root")
    assert owners.stdout.split() == ["root", "root"]
