"""Build and find the cached root file systems."""

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sandbox import host, namespace
from sandbox.errors import BuildError
from sandbox.locks import locked_directory
from sandbox.paths import builds_dir
from sandbox.progress import Progress
from sandbox.suites import Suite, mirror

#: Unprivileged users of every sandbox and their user ids.
USERS = {"alice": 1001, "bob": 1002}

_COMPLETE = "complete"


@dataclass(frozen=True)
class Build:
    """A finished root file system in the cache."""

    suite: Suite
    directory: Path

    @property
    def root(self) -> Path:
        """The root file system itself."""
        return self.directory / "root"

    @property
    def slurm_version(self) -> str:
        """Slurm's full version, such as 26.05.5."""
        status = (self.root / "var/lib/dpkg/status").read_text(encoding="utf-8", errors="replace")
        found = re.search(r"^Package: slurmctld\n(?:.+\n)*?Version: ([0-9.]+)", status, re.MULTILINE)
        if found is None:
            raise BuildError(f"{self.root} holds no slurmctld: remove {self.directory} and try again")
        return found.group(1)


def ensure_rootfs(suite: Suite, progress: Progress) -> Build:
    """Return the cached root file system of a suite, building it first if there is none."""
    build = Build(suite, builds_dir() / f"{suite.name}-{suite.recipe_hash}")
    if (build.directory / _COMPLETE).exists():
        return build
    host.require_tools({"debootstrap": "debootstrap"})
    with locked_directory(builds_dir() / "build.lock", progress, "another process that is building a sandbox"):
        if not (build.directory / _COMPLETE).exists():
            _build(build, progress)
    return build


def _build(build: Build, progress: Progress) -> None:
    """Build in a temporary directory and rename at the end, so that no broken cache is ever seen."""
    for leftover in builds_dir().glob("building-*"):
        shutil.rmtree(leftover)
    temporary = Path(tempfile.mkdtemp(prefix="building-", dir=builds_dir()))
    temporary.chmod(0o755)
    try:
        _debootstrap(build.suite, temporary / "root", progress)
        _prepare(temporary / "root", progress)
        (temporary / _COMPLETE).touch()
        if build.directory.exists():
            shutil.rmtree(build.directory)
        temporary.rename(build.directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _debootstrap(suite: Suite, root: Path, progress: Progress) -> None:
    progress.step(f"installing Debian {suite.name} with Slurm (first start only, one to three minutes)")
    command = [
        "debootstrap", "--variant=minbase", f"--include={','.join(suite.packages)}",
        suite.name, str(root), mirror(), f"/usr/share/debootstrap/scripts/{suite.script}",
    ]  # fmt: skip
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    recent: list[str] = []
    try:
        with namespace.contained(command, environment) as output:
            for number, line in enumerate(output, 1):
                recent = [*recent[-14:], line.rstrip()]
                if line.startswith("I: "):
                    progress.detail(f"debootstrap: {line[3:].strip()} (message {number})")
    except subprocess.CalledProcessError as err:
        raise BuildError(
            f"debootstrap of {suite.name} from {mirror()} failed; its last words were:\n  "
            + "\n  ".join(recent)
            + "\nCheck the network and the mirror ($MURI_DEBIAN_MIRROR), then try again."
        ) from err


def _prepare(root: Path, progress: Progress) -> None:
    """Add the users and let go of what is never read."""
    progress.step("adding the users " + " and ".join(USERS))
    for user, uid in USERS.items():
        command = ["useradd", "--root", str(root), "--create-home", "--uid", str(uid), "--user-group",
                   "--shell", "/bin/bash", user]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"could not add the user {user}: {done.stderr.strip()}")
    for directory in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man"):
        shutil.rmtree(root / directory, ignore_errors=True)
