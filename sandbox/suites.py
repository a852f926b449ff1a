"""The Debian suites a sandbox can be made of, and the hash that names a cached build."""

import functools
import hashlib
import os
import subprocess
from dataclasses import dataclass

from sandbox.errors import UsageError

#: Raise this when a build step changes in a way that the packages don't show.
BUILD_VERSION = 1

#: Libraries the standard library's extension modules of a Python from outside need (sqlite3, ctypes, …).
_PYTHON_LIBRARIES = ("libsqlite3-0", "libffi8", "libexpat1", "libuuid1")
_SLURM = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libslurm-dev")
_TOOLS = ("gcc", "libc6-dev", "make", "procps", "ca-certificates")


@dataclass(frozen=True)
class Suite:
    """One Debian release with its Slurm.

    Attributes:
        script: The debootstrap script that knows how to install the suite.
        auth: Slurm's authentication plugin; munge runs a daemon of its own.
        cgroup_conf: Content of cgroup.conf. Slurm 22.05 has no "disabled" cgroup plugin, and needs none
            as long as no plugin that uses cgroups is configured.
    """

    name: str
    script: str
    auth: str
    cgroup_conf: str
    extra_packages: tuple[str, ...] = ()

    @property
    def packages(self) -> tuple[str, ...]:
        """Every package the root file system gets on top of debootstrap's minimal base."""
        return tuple(sorted({*_SLURM, *_TOOLS, *_PYTHON_LIBRARIES, *self.extra_packages}))

    @property
    def recipe_hash(self) -> str:
        """Names the cached build: the same recipe gives the same name."""
        parts = (str(BUILD_VERSION), self.name, self.script, mirror(), *self.packages)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


SUITES = {
    "forky": Suite("forky", "sid", "slurm", "CgroupPlugin=disabled\n", extra_packages=("libreadline8t64",)),
    "bookworm": Suite("bookworm", "bookworm", "munge", "", extra_packages=("munge", "libreadline8")),
}


def suite_named(name: str) -> Suite:
    """Find a suite, or say which there are."""
    try:
        return SUITES[name]
    except KeyError:
        raise UsageError(f"--suite {name!r} is unknown: choose one of {', '.join(sorted(SUITES))}") from None


def mirror() -> str:
    """Where Debian packages come from: `$MURI_DEBIAN_MIRROR`, or the mirror that this machine's apt uses.

    Raises:
        UsageError: Neither is known.
    """
    named = os.environ.get("MURI_DEBIAN_MIRROR") or _mirror_of_apt()
    if not named:
        raise UsageError("apt on this machine names no Debian mirror: set MURI_DEBIAN_MIRROR to the address of one")
    return named.rstrip("/")


@functools.cache
def _mirror_of_apt() -> str:
    """The first source of apt that holds a whole release, not its security or other updates; "" if none."""
    command = ["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)", "Created-By: Packages"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    sources = [line.split() for line in listed.splitlines() if len(line.split()) == 2]
    return next((address for release, address in sources if "-" not in release), "")
