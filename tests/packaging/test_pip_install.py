"""`pip install muri` alone, or a module with it: what users have without Slurm and Muri's packages."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from muri import __version__
from sandbox import host
from sandbox.support import CHECKOUT

pytestmark = [pytest.mark.thorough, pytest.mark.xdist_group("pip-install")]

LMOD = "/usr/share/lmod/lmod/libexec/lmod"
ROOMS = ("launcher", "muri", "policies", "profiler", "simulator", "slurm_plugin")

SCRIPT = """
import muri, sys
with muri.stage("load"):
    print(sys.prefix, sys.argv[1:])
sys.exit(3)
"""


def tracked(*folders: str) -> list[str]:
    listed = subprocess.run(["git", "-C", CHECKOUT, "ls-files", *folders], capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (CHECKOUT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this tree."""
    place = tmp_path_factory.mktemp("wheel")
    for name in tracked("pyproject.toml", "README.md", "LICENSE", *ROOMS):
        (place / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / name, place / "source" / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*pip, place, place / "source"], check=True)
    (built,) = place.glob("muri-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment that holds it and its dependencies."""
    place = tmp_path_factory.mktemp("user") / "env"
    venv.create(place, with_pip=True)
    subprocess.run([place / "bin/pip", "install", "--quiet", wheel], check=True)
    return place


def muri(installed: Path, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{installed}/bin", "HOME": str(installed), **variables}
    return subprocess.run(
        [installed / "bin/muri", *words], capture_output=True, text=True, check=False, env=environment
    )


def test_the_wheel_holds_every_file_of_the_rooms(wheel: Path) -> None:
    held = {name.removeprefix("muri/") for name in zipfile.ZipFile(wheel).namelist()}
    assert {name.removeprefix("muri/") for name in tracked(*ROOMS) if not name.endswith(".gitignore")} <= held


@pytest.mark.parametrize("of_user", [False, True])
def test_a_script_runs_alone(installed: Path, tmp_path: Path, of_user: bool) -> None:
    """Also in another Python, which does not have Muri."""
    (tmp_path / "train.py").write_text(SCRIPT)
    python = Path(sys.base_prefix, "bin/python3")
    variables = {"MURI_PYTHON": str(python)} if of_user else {}
    done = muri(installed, "run", tmp_path / "train.py", "--lr", "0.1", **variables)
    assert done.stdout == f"{sys.base_prefix if of_user else installed} ['--lr', '0.1']\n", done.stderr
    assert done.returncode == 3


@pytest.mark.parametrize("command", ["queue", "top", "explain 7", "report", "preempt 7", "drain", "plan --save x.json"])
def test_what_needs_slurm_says_so(installed: Path, command: str) -> None:
    done = muri(installed, *command.split())
    assert done.returncode == 1
    assert "is not in PATH: this needs a host of the cluster" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["--help", "policies", "config check", "doctor", "profile list"])
def test_what_needs_no_slurm_works(installed: Path, command: str) -> None:
    done = muri(installed, *command.split())
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_easybuild_makes_a_module_under_which_the_users_python_runs_scripts(wheel: Path, tmp_path: Path) -> None:
    host.require_tools({LMOD: "lmod"})
    venv.create(tmp_path / "eb", with_pip=True)
    subprocess.run(
        [tmp_path / "eb/bin/pip", "install", "-q", "easybuild-framework", "easybuild-easyblocks"], check=True
    )
    (recipe,) = (CHECKOUT / "packaging/easybuild").glob("*.eb")
    environment = {"PATH": f"{Path(sys.base_prefix, 'bin')}:{os.defpath}", "HOME": str(tmp_path), "LMOD_CMD": LMOD,
                   "EB_PYTHON": str(tmp_path / "eb/bin/python")}  # fmt: skip
    eb = [tmp_path / "eb/bin/eb", "--allow-use-as-root-and-accept-consequences", "--modules-tool=Lmod",
          f"--prefix={tmp_path}", f"--sourcepath={wheel.parent}", recipe]  # fmt: skip
    subprocess.run(eb, check=True, env=environment)

    venv.create(tmp_path / "own")
    (tmp_path / "train.py").write_text(SCRIPT)
    load = f'eval "$({LMOD} bash load Muri/{__version__})"; PATH={tmp_path}/own/bin:$PATH; muri run train.py'
    environment["MODULEPATH"] = f"{tmp_path}/modules/all"
    done = subprocess.run(
        ["bash", "-c", load], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (3, f"{tmp_path}/own []\n"), done.stderr
