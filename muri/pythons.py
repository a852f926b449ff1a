"""The Python that runs a user's script, how Muri's code gets into it, and what brings modules that are missing here.

Users bring PyTorch in an environment of their own, in which Muri need not be installed. Code that runs there uses the
standard library, PyTorch and NumPy only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muri.errors import UsageError
from muri.text import json_of

OLDEST: Final = (3, 8)
"""Oldest Python of a script; pyproject.toml lists the files that are imported there."""

OLDEST_OF_THREADS: Final = (3, 11)
"""Oldest one in which members are threads of the group's runtime."""

PYTHON_VARIABLE: Final = "MURI_PYTHON"
"""The Python of scripts, where neither Muri's own nor the first in PATH is right."""

OWN_VARIABLE: Final = "MURI_OWN_PYTHON"
"""Muri's own Python, for a script's; unset where both are the same."""

DECIDING: Final = (
    "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME", "PYTHONNOUSERSITE", "PYTHONPATH", "PYTHONSAFEPATH",
    "PYTHONUSERBASE", "VIRTUAL_ENV",
)  # fmt: skip
"""Variables that decide which modules a script imports; slurm_plugin/spank/facts.c has the same."""

MEMBERS_PREFIX: Final = "MURI_MEMBERS_"
"""Before the names of these variables on their way to a group's runtime: the pilot itself has no use for them."""

_PROBE: Final = "import json, sys; print(json.dumps([sys.prefix, sys.version, sys.version_info[:2]]))"


@dataclass(frozen=True)
class ScriptPython:
    """A Python."""

    executable: str  # How it is called
    prefix: str  # Of its environment, as in `sys.prefix`
    version: str  # As in `sys.version`
    release: tuple[int, int]  # Its first two numbers

    @property
    def is_own(self) -> bool:
        """Whether it is the one that runs this."""
        return (self.prefix, self.version) == (sys.prefix, sys.version)

    @property
    def why_too_old(self) -> str:
        """Why Muri cannot run in it, "" when it can."""
        if self.release >= OLDEST:
            return ""
        found, needed = (".".join(map(str, release)) for release in (self.release, OLDEST))
        return f"{self.executable} is Python {found}; Muri needs {needed} to measure a script or to group it"


def own_python() -> ScriptPython:
    """The Python that runs this."""
    return ScriptPython(sys.executable, sys.prefix, sys.version, sys.version_info[:2])


def script_python(environment: Mapping[str, str]) -> ScriptPython:
    """Return the Python for a script.

    $MURI_PYTHON, else the one that runs this where Muri is installed in it, as in a user's environment; else the first
    `python3` of PATH: then Muri runs in an environment of its own, which users' scripts have nothing to do with.

    Raises:
        UsageError: It is not there, or does not run.
    """
    named = environment.get(PYTHON_VARIABLE, "")
    if not named and _is_installed_here():
        return own_python()
    path = environment.get("PATH")
    found = shutil.which(named, path=path) if named else shutil.which("python3", path=path) or shutil.which("python")
    if found is None and named:
        raise UsageError(f"{PYTHON_VARIABLE}={named!r}: there is no such program; give the path of a Python")
    return own_python() if found is None else look_at(str(Path(found).absolute()), environment)


def look_at(executable: str, environment: Mapping[str, str]) -> ScriptPython:
    """Ask a Python for its prefix and version; raises a UsageError if it does not answer."""
    command = [executable, "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=dict(environment), check=True)
        prefix, version, release = json_of(done.stdout.splitlines()[-1])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError) as error:
        raise UsageError(f"{executable} does not run as a Python ({error}); see ${PYTHON_VARIABLE}") from error
    return ScriptPython(executable, prefix, version, (release[0], release[1]))


def _is_installed_here() -> bool:
    """Whether Muri is among this Python's own packages, rather than beside them as PYTHONPATH or a .pth file says."""
    own = (Path(entry) for entry in sys.path if Path(sys.prefix) in (Path(entry), *Path(entry).parents))
    return any(any(folder.glob("muri-*.dist-info")) for folder in own)


def library_dir() -> Path:
    """Return the directory that PYTHONPATH has to name for a Python in which Muri is not installed."""
    return Path(__file__).parent / "elsewhere"


def of_members(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a runtime under the members' own Python: the pilot's, with the members' variables."""
    own = {name: value for name, value in environment.items() if not name.startswith(MEMBERS_PREFIX)}
    given = {name: environment[MEMBERS_PREFIX + name] for name in DECIDING if MEMBERS_PREFIX + name in environment}
    return with_library({**own, **given})


def with_library(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which any Python finds Muri, this very version of it, and Muri's own Python."""
    library, path = str(library_dir()), environment.get("PYTHONPATH", "")
    entries = [library, *(entry for entry in path.split(os.pathsep) if path and entry != library)]
    return {**environment, "PYTHONPATH": os.pathsep.join(entries), OWN_VARIABLE: sys.executable}


def own_command(environment: Mapping[str, str], module: str) -> list[str]:
    """Return the command that runs one of Muri's modules in Muri's own Python, from inside any other one.

    The script's variables for Python have no meaning there, so it heeds none of them.
    """
    own = environment.get(OWN_VARIABLE) or sys.executable
    return [own, "-I", "-c", _RUN_MODULE, str(library_dir()), module]


_RUN_MODULE: Final = (
    "import sys, runpy; sys.path.insert(0, sys.argv.pop(1));"
    " runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


THE_LAB: Final = "pip install ./lab in Muri's checkout, into the environment of this muri"
"""What brings the distribution muri-lab and the Python modules that only it needs."""

OF_THE_CONTROLLER: Final = frozenset({"highspy", "networkx", "numpy", "prometheus_client", "rustworkx", "scipy"})
"""Modules of Muri's dependencies that the package muri-node leaves out."""

_PACKAGES: Final = Path("/usr/lib/muri")


def is_packaged(place: Path = Path(__file__)) -> bool:
    """Whether this Muri, of which `place` is a file, comes from its own .deb or .rpm."""
    return _PACKAGES in place.parents


def what_brings(extra: str, package: str) -> str:
    """Say how to install a Python module that only an extra of Muri has; `package` is the .deb or .rpm with it.

    The packages muri-node and muri-controller bring environments of their own, into which pip installs nothing.
    """
    return f"the package {package} brings it" if is_packaged() else f"pip install 'muri[{extra}]'"


def what_plans(module: str) -> str:
    """Say where a command works that needs one of `OF_THE_CONTROLLER`, to end a sentence about it."""
    return (
        f"needs the Python module {module}, which is not here: run it where the package muri-controller is installed, "
        "or in an environment into which pip has installed Muri"
    )
