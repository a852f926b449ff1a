"""Commands on a host that has the package muri-node alone: it brings neither NumPy nor what plans with it."""

import subprocess
import sys

import pytest

BLOCKED = """\
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpy", "scipy", "networkx", "rustworkx", "prometheus_client", "torch"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
sys.argv[0] = "muri"
from muri.cli import main
main()
"""


def muri(*arguments):
    return subprocess.run([sys.executable, "-c", BLOCKED, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [("simulate", "x.csv"), ("simulate", "--help")])
def test_a_command_that_plans_says_which_package_brings_what_it_needs(arguments):
    done = muri(*arguments)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "numpy" in done.stderr
    assert "muri-controller" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("run", "--help"), ("top", "--help"), ("setup", "--help"), ("queue", "--help"), ("config", "show"),
     ("profile", "list", "--help")],
)  # fmt: skip
def test_commands_of_users_need_none_of_it(arguments):
    done = muri(*arguments)
    assert done.returncode == 0, done.stderr
