"""The command muri where no Muri is installed, and what packages need of pyproject.toml."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

import muri
from muri.launcher.run.command import run
from sandbox.packages import Target, deb_control, maintainer_scripts, package_table, python_requirements

ROOT = Path(__file__).parents[2]
SHIM = ROOT / "packaging/files/muri"
STAND_IN = ROOT / "packaging/files/stand_in"


def shim(*arguments, **environment):
    if Path("/usr/lib/muri/node").exists():
        pytest.skip("Muri is installed on this machine")
    return subprocess.run(
        ["sh", str(SHIM), *arguments], capture_output=True, text=True, check=False,
        env={**os.environ, "MURI_PYTHON": sys.executable, **environment},
    )  # fmt: skip


def test_without_muri_a_script_is_run_by_python(tmp_path):
    script = tmp_path / "train me.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(7)")
    done = shim("run", "--timing", "--isolation", "process", "--trace=x", str(script), "--lr", "0.1", "two words", "")
    assert (done.stdout, done.returncode) == ("['--lr', '0.1', 'two words', '']\n", 7)
    assert "Zen" in shim("run", "-m", "this").stdout
    for words in (["-OuW", "ignore me"], ["python", "-O"], [sys.executable, "-O"]):
        assert shim("run", *words, "-c", "print(__debug__)", MURI_PYTHON=sys.executable).stdout == "False\n", words


def test_without_muri_a_program_of_path_is_run(tmp_path):
    program = tmp_path / "torchrun"
    program.write_text(f"#!{sys.executable}\nimport sys; print(sys.argv)")
    program.chmod(0o755)
    done = shim("run", "torchrun", "--nproc", "2", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.stdout == f"['{program}', '--nproc', '2']\n"


def test_every_option_of_muri_run_is_known_to_the_shim(tmp_path):
    script = tmp_path / "x.py"
    script.write_text("print('ran')")
    for option in run.params:
        if not isinstance(option, click.Option):
            continue
        for name in option.opts:
            words = [name] if option.is_flag else [name, "process"]
            assert shim("run", *words, str(script)).stdout == "ran\n", name


@pytest.mark.parametrize("arguments", [(), ("queue",), ("run",), ("run", "--nonsense", "x"), ("run", "--trace")])
def test_without_muri_anything_else_says_what_is_wrong(arguments):
    done = shim(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("muri: ")
    assert "Traceback" not in done.stderr


def test_the_stand_in_has_every_name_of_the_real_one():
    tree = ast.parse((STAND_IN / "muri/__init__.py").read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert defined == {*muri.__all__} - {"__version__"}


def test_scripts_run_with_the_stand_in(tmp_path):
    script = tmp_path / "x.py"
    script.write_text(
        "import muri\n"
        "start = muri.checkpoint(print, print, every_s=9)\n"
        "accumulate = muri.accumulate()\n"
        "for batch in muri.batches(muri.cache([1, 2], gib=1)):\n"
        "    with muri.stage('propagate'):\n"
        "        assert list(accumulate(batch)) == [batch]\n"
        "    muri.yield_point()\n"
        "    assert not muri.should_stop()\n"
        "print(batch, start.resumed, start.iteration, start.epoch, start.path)\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(STAND_IN)}
    )
    assert done.stdout == "2 False 0 0 None\n"
    assert "no checkpoint" in done.stderr


def test_the_nodes_package_needs_what_the_project_has():
    found = python_requirements()
    assert len(found["node"]) == len(package_table()["muri-node"]["python"])
    assert {*found["node"]} < {*found["controller"]}


@pytest.fixture
def target():
    return Target("0.2.0-1", "python3.13", "24.11", "24.12")


def test_the_plugin_names_the_release_that_it_was_compiled_for(target):
    control = deb_control(target, "muri-spank", package_table()["muri-spank"], 1)
    assert "Version: 0.2.0+slurm24.11-1\n" in control
    assert "slurm-client (>= 24.11~)" in control
    assert "slurm-client (<< 24.12~)" in control


def test_packages_of_one_version_belong_together(target):
    for name in ("muri-node", "muri-controller"):
        control = deb_control(target, name, package_table()[name], 1)
        assert "(= 0.2.0-1)" in control
        assert "python3.13" in control


@pytest.mark.parametrize("name", [*package_table()])
def test_scripts_of_packages_are_plain_shell(target, name):
    for text in maintainer_scripts(target, name).values():
        subprocess.run(["sh", "-n"], input=text, text=True, check=True)
