"""Builds that are made once and cached: the root file system of a suite, and pyslurm for its Slurm and this Python."""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandbox import host, namespace
from sandbox.cluster import Suite, mirror
from sandbox.init import Bind, Plan, TextFile
from sandbox.support import BuildError, Progress, builds_dir, locked_directory

#: Unprivileged users of every sandbox and their user ids.
USERS = {"alice": 1001, "bob": 1002}
_COMPLETE = "complete"
PYSLURM_VERSION = "25.11.2"

#: Slurm releases that this pyslurm is known to compile for.
BUILDABLE_FOR = ("25.11", "26.05")
_LOG = "pyslurm-build.log"
_OUTPUT = Path("/opt/muri/pyslurm")
_SCRIPT = Path("/tmp/build-pyslurm")  # inside the build's own root
_INCLUDE = "/tmp/slurm-include"

_VERSION_HEADER = "usr/include/slurm/slurm_version.h"

#: pyslurm's headers are those of 25.11. From 26.05 on Slurm keeps the old names behind a switch of its own; two more
#: that it dropped are mapped on the command line. Where Slurm still has them, the mapping would be an error.
_COMPATIBILITY_FLAGS = (
    "-DSLURM_BACKWARD_COMPAT -Dslurm_free_ctl_conf=slurm_free_conf -DESLURM_ERROR_ON_DESC_TO_RECORD_COPY=2065"
)
_DROPS_OLD_NAMES = 0x1A0500  # 26.05 as SLURM_VERSION_NUMBER has it


def pyslurm_script(version_header: str) -> str:
    """Return the script that compiles pyslurm for a Slurm, given its slurm_version.h."""
    number = re.search(r"^#define SLURM_VERSION_NUMBER (0x[0-9a-f]+)", version_header, re.MULTILINE)
    is_new = number is not None and int(number[1], 16) >= _DROPS_OLD_NAMES
    flags = " ".join(["-O1 -w", *([_COMPATIBILITY_FLAGS] if is_new else [])])
    return f"""#!/bin/sh
set -eu
mkdir -p {_INCLUDE}/slurm
ln -s /usr/include/slurm/*.h {_INCLUDE}/slurm/
rm {_INCLUDE}/slurm/slurm_version.h
# pyslurm refuses every release but its own, so the header names the release that pyslurm was made for.
sed 's/^#define SLURM_VERSION_NUMBER .*/#define SLURM_VERSION_NUMBER 0x190b00/' \\
    /{_VERSION_HEADER} > {_INCLUDE}/slurm/slurm_version.h
library=$(dirname "$(find /usr/lib -name libslurm.so | head -n 1)")
export SLURM_INCLUDE_DIR={_INCLUDE} SLURM_LIB_DIR="$library" CFLAGS="{flags}"
exec "$1" -m pip install --verbose --root-user-action=ignore --no-cache-dir --no-deps --no-compile \\
    --target {_OUTPUT} pyslurm=={PYSLURM_VERSION}
"""


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
        header = self.root / _VERSION_HEADER
        text = header.read_text(encoding="utf-8") if header.exists() else ""
        found = re.search(r"^#define SLURM_VERSION_NUMBER 0x(..)(..)(..)", text, re.MULTILINE)
        if found is None:
            raise BuildError(f"{self.root} holds no Slurm: remove {self.directory} and try again")
        year, month, micro = (int(part, 16) for part in found.groups())
        return f"{year}.{month:02}.{micro}"

    @property
    def complete(self) -> bool:
        """Whether it is finished."""
        return (self.directory / _COMPLETE).exists()

    @property
    def pyslurm_script(self) -> str:
        """Compiles pyslurm for this Slurm, in this root."""
        return pyslurm_script((self.root / _VERSION_HEADER).read_text(encoding="utf-8"))


def ensure_rootfs(suite: Suite, progress: Progress) -> Build:
    """Return the cached root file system of a suite, building it first if there is none."""
    build = Build(suite, builds_dir() / (suite.built or f"{suite.name}-{suite.recipe_hash}"))
    if build.complete:
        return build
    host.require_tools({"debootstrap": "debootstrap"})
    with locked_directory(builds_dir() / "build.lock", progress, "another process that is building a sandbox"):
        if not build.complete:
            with building(build) as temporary:
                _debootstrap(build.suite, temporary / "root", progress)
                _prepare(temporary / "root", progress)
    return build


@contextlib.contextmanager
def building(build: Build) -> Iterator[Path]:
    """Give a temporary directory, which takes the build's place at the end: no broken cache is ever seen."""
    for leftover in builds_dir().glob("building-*"):
        shutil.rmtree(leftover)
    temporary = Path(tempfile.mkdtemp(prefix="building-", dir=builds_dir()))
    temporary.chmod(0o755)
    try:
        yield temporary
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
        suite.debian or suite.name, str(root), mirror(), f"/usr/share/debootstrap/scripts/{suite.script}",
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
    """Add the users and delete what is never read."""
    progress.step("adding the users " + " and ".join(USERS))
    person = ("--create-home", "--user-group", "--shell", "/bin/bash", "--uid")
    commands: dict[str, tuple[str, ...]] = {user: (*person, str(uid)) for user, uid in USERS.items()}
    if "slurm:" not in (root / "etc/passwd").read_text(encoding="utf-8"):  # a package of Slurm's would add it
        commands["slurm"] = ("--system", "--user-group")
    for user, options in commands.items():
        command = ["useradd", "--root", str(root), *options, user]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"could not add the user {user}: {done.stderr.strip()}")
    for directory in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man"):
        shutil.rmtree(root / directory, ignore_errors=True)


@dataclass(frozen=True)
class Pyslurm:
    """The outcome: a directory to import pyslurm from, or the reason there is none."""

    directory: Path | None
    reason: str = ""


def ensure_pyslurm(build: Build, progress: Progress) -> Pyslurm:
    """Return the cached pyslurm for this root and this Python, building it if there is none."""
    release = ".".join(build.slurm_version.split(".")[:2])
    if release not in BUILDABLE_FOR:
        return Pyslurm(None, _refusal(build.slurm_version, f"it supports {' and '.join(BUILDABLE_FOR)}"))
    directory = build.directory / f"pyslurm-{PYSLURM_VERSION}-{host.python_tag()}"
    failed = _failure_note(directory)
    if failed.exists():
        why = f"the build failed, see {build.directory / _LOG}; remove {failed} to try again"
        return Pyslurm(None, _refusal(build.slurm_version, why))
    if directory.exists():
        return Pyslurm(directory)
    with locked_directory(build.directory, progress, "another process that is building pyslurm"):
        if directory.exists():
            return Pyslurm(directory)
        return _build_pyslurm(build, directory, progress)


def _failure_note(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.failed")


def _refusal(slurm_version: str, why: str) -> str:
    return (
        f"pyslurm {PYSLURM_VERSION} cannot be built for Slurm {slurm_version} ({why}), "
        "so Muri uses the command gateway here"
    )


def _build_pyslurm(build: Build, directory: Path, progress: Progress) -> Pyslurm:
    for leftover in build.directory.glob("building-*"):
        shutil.rmtree(leftover)
    temporary = Path(tempfile.mkdtemp(prefix="building-", dir=build.directory))
    try:
        output = temporary / "pyslurm"
        output.mkdir(mode=0o755)
        log = build.directory / _LOG
        try:
            _compile(build, temporary, output, log, progress)
        except subprocess.CalledProcessError:
            # Later starts must not spend a minute on the same failure.
            _failure_note(directory).touch()
            return Pyslurm(None, _refusal(build.slurm_version, f"the build failed, see {log}"))
        output.rename(directory)
        return Pyslurm(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _compile(build: Build, temporary: Path, output: Path, log: Path, progress: Progress) -> None:
    progress.step(f"building pyslurm {PYSLURM_VERSION} for Slurm {build.slurm_version} (first start only)")
    plan = pyslurm_plan(build, temporary / "mnt", output)
    with log.open("w", encoding="utf-8") as log_stream, namespace.run_plan(plan, temporary / "plan.json") as lines:
        for line in lines:
            log_stream.write(line)
            if line.strip().startswith(("building '", "[", "Compiling", "Collecting", "Installing")):
                progress.detail(f"pip: {line.strip()[:80]}")


def pyslurm_plan(build: Build, mountpoint: Path, output: Path) -> Plan:
    """Return the plan of the build's root in which pip compiles pyslurm, with the host's network."""
    python = str(host.python_executable())
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(Path.home()), "LC_ALL": "C.UTF-8"}
    return Plan(
        lower=str(build.root),
        mountpoint=str(mountpoint),
        binds=(*host.python_binds(), *host.pip_binds(), Bind(str(output), str(_OUTPUT), read_only=False)),
        files=(TextFile(str(_SCRIPT), build.pyslurm_script, 0o755),),
        command=("/bin/sh", str(_SCRIPT), python),
        environment={**environment, **host.pip_environment(), "MAKEFLAGS": f"-j{os.cpu_count() or 1}"},
    )
