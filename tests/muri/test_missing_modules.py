"""Commands on a host that has the package muri-node alone: it brings neither NumPy nor what plans with it."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

from muri.profiler.gpu_usage import check as why_no_gpu
from muri.pythons import OF_THE_CONTROLLER, is_packaged, what_brings
from muri.slurm_plugin.gateway.base import GatewayUnavailableError
from muri.slurm_plugin.gateway.pyslurm_api import NoPyslurmError, check_library, import_pyslurm
from sandbox.packages import python_requirements

ROOT = Path(__file__).parents[2]

BLOCKED = """\
import json, sys

left_out = frozenset(json.loads(sys.argv.pop(1)))

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in left_out:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in [*sys.modules]:  # what this Python's start has loaded
    if name.partition(".")[0] in left_out:
        del sys.modules[name]
sys.meta_path.insert(0, Blocked())
sys.argv[0] = "muri"
"""

ON_SLURM = """\
sys.path.append(sys.argv.pop(1))
from fake_slurm import FakeSlurm, make_job, make_node
from muri.slurm_plugin.controller import assemble
from muri.slurm_plugin.gateway import commands
from muri.slurm_plugin.node import membership
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import JobState

at_work = {"state": JobState.RUNNING, "held": False, "nodes": "n1"}
state = tags.format_state(tags.MemberState(9, tags.Original("gres/gpu:1", "", 4, 4, 0, 3600)))
group = [
    *(make_job(id, **at_work, admin_comment=f"muri:model=m {tags.STATE_PREFIX}{state}") for id in (2, 3)),
    make_job(4, **at_work, comment="muri-checkpoint:0", admin_comment="muri:model=m,checkpoint=1"),
    make_job(9, **at_work, name="muri-pilot", admin_comment="muri-pilot:f00d:2,3"),
]
waiting = [make_job(1), make_job(30, array=True, array_job_id=30, array_tasks="4-9")]
fake = FakeSlurm(waiting if "--forget" in sys.argv else waiting + group, [make_node("n1")])
fake._modify = lambda job_id, change: fake._update(job_id, admin_comment=change.admin_comment or "")  # no twin here
assemble.open_gateway = commands.CommandGateway = lambda *_: fake
membership.mark_stopped = lambda *_: None
"""

MAIN = "from muri.cli import main\nmain()\n"


def closure(lines: Iterable[str]) -> set[str]:
    """The distributions that requirements name, and what these need."""
    found: set[str] = set()
    waiting = list(lines)
    while waiting:
        name = plain(re.split(r"[^\w.-]", waiting.pop())[0])
        if name in found:
            continue
        found.add(name)
        with suppress(PackageNotFoundError):  # of another system or Python than this one
            waiting += [line for line in requires(name) or () if "extra ==" not in line]
    return found


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def modules_without(distributions: set[str]) -> set[str]:
    """Modules of this Python that none of the distributions, nor Muri, brings."""
    kept = {*distributions, "muri"}
    return {name for name, owners in packages_distributions().items() if not {*map(plain, owners)} & kept}


LEFT_OUT = json.dumps(sorted(modules_without(closure(python_requirements()["node"]))))


def muri(*arguments):
    command = [sys.executable, "-c", BLOCKED + MAIN, LEFT_OUT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def on_slurm(tmp_path):
    """Run a command where Slurm has a waiting job, a group, a job with a checkpoint, and an array."""
    (tmp_path / "muri.yaml").write_text(f"state_dir: {tmp_path}/state\nstatus_dir: {tmp_path}/status\ngate: hold\n"
                                      f"events: {{notice_file: {tmp_path}/notice}}\n")  # fmt: skip
    (tmp_path / "slurm.conf").write_text("GresTypes=gpu\nNodeName=n1 Gres=gpu:2 CPUs=4\n")
    environment = {**os.environ, "PATH": "/nowhere", "MURI_CONFIG": str(tmp_path / "muri.yaml")}

    def run(*arguments):
        command = [sys.executable, "-c", BLOCKED + ON_SLURM + MAIN, LEFT_OUT, str(ROOT / "tests/slurm_plugin")]
        return subprocess.run(
            [*command, *arguments], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
        )

    return run


def test_one_list_tells_what_the_nodes_package_leaves_out():
    found = python_requirements()
    more = modules_without(closure(found["node"])) - modules_without(closure(found["controller"]))
    assert more == OF_THE_CONTROLLER
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (own,) = [each for each in contracts if "muri-node" in each["name"]]
    assert {*own["forbidden_modules"]} == OF_THE_CONTROLLER


@pytest.mark.parametrize("arguments", [("simulate", "x.csv"), ("policies",), ("trace", "check", "x.csv")])
def test_a_command_that_plans_says_which_package_brings_what_it_needs(arguments):
    done = muri(*arguments)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert any(module in done.stderr for module in OF_THE_CONTROLLER)
    assert "muri-controller" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("run", "--help"), ("top", "--help"), ("queue", "--help"),
     ("config", "check", "--show"), ("profile", "list", "--help"), ("simulate", "--help")],
)  # fmt: skip
def test_commands_of_users_need_none_of_it(arguments):
    done = muri(*arguments)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("queue",), 0, "5 jobs"),
        (("explain", "1"), 0, "Job 1 (m1) of alice: waiting"),
        (("explain", "2"), 0, "It shares the GPUs of pilot job 9 with 3."),
        (("explain", "30_5"), 0, "Job 30_[4-9] (m1) of alice"),
        (("plan", "--save", "-"), 0, '"job_id": 30'),
        (("preempt", "4", "--yes"), 0, "job 4 is being saved"),
        (("preempt", "1", "--yes"), 2, ""),
        (("drain",), 0, "released  1"),
        (("doctor",), 1, "policy auto only"),
        (("config", "check"), 0, "of policy auto only the name was checked"),
        (("drain", "--forget"), 0, "AdminComment of jobs 1, 30"),
    ],
)  # fmt: skip
def test_whoever_looks_drains_or_removes_needs_none_of_it_either(on_slurm, arguments, code, told):
    done = on_slurm(*arguments)
    assert (done.returncode, "muri-controller is installed" in done.stderr) == (code, False), done.stderr
    assert told in done.stdout
    assert "Traceback" not in done.stderr


def test_advice_fits_how_muri_was_installed(monkeypatch):
    assert not is_packaged(Path("/opt/muri/lib/python3.13/site-packages/muri/pythons.py"))
    assert is_packaged(Path("/usr/lib/muri/0.2.0-1/lib/muri/pythons.py"))
    monkeypatch.setattr("muri.pythons.is_packaged", lambda: False)
    assert what_brings("torch", "muri-node") == "pip install 'muri[torch]'"
    monkeypatch.setattr("muri.pythons.is_packaged", lambda: True)
    assert what_brings("slurm", "muri-controller") == "the package muri-controller brings it"


@pytest.mark.parametrize("packaged", [True, False])
def test_advice_on_modules_that_the_packages_bring_names_an_extra_only_after_pip(monkeypatch, packaged):
    for name in ("pythons.is_packaged", "slurm_plugin.gateway.pyslurm_api.is_packaged"):
        monkeypatch.setattr(f"muri.{name}", lambda: packaged)
    for module in ("pynvml", "pyslurm"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(NoPyslurmError) as no_pyslurm:
        import_pyslurm()
    with pytest.raises(GatewayUnavailableError) as wrong_release:
        check_library("24.11.1", "23.02")
    for told in (why_no_gpu(), str(no_pyslurm.value), str(wrong_release.value)):
        assert ("pip install" in told) is not packaged
        assert ("package" in told.replace("Python package", "")) is packaged
