"""Slurm built from its source tree, for releases that Debian does not have: a root file system like a suite's."""

import hashlib
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from sandbox import builds, namespace
from sandbox.builds import Build
from sandbox.cluster import SOURCE_BASE, SUITES, Suite
from sandbox.init import Bind, Plan, TextFile
from sandbox.support import BuildError, Progress, UsageError, builds_dir, locked_directory

SOURCE_PREFIX: Final = "source-"
"""Begins the name of a suite with a Slurm from source, such as source-25.11.7."""

_CGROUPS_CAN_BE_DISABLED: Final = [24, 5]
#: Before it clients wait for ever where several slurmds share the socket of auth/slurm.
_SHARES_ITS_SOCKET: Final = [24, 11]

#: Inside the build's own root.
_TREE, _OUTPUT, _SCRIPT = "/tmp/slurm", "/tmp/installed", "/tmp/build-slurm"

#: As Debian builds it, without what no test needs. All slurmds of a sandbox run on one machine.
_COMPILE: Final = f"""#!/bin/sh
set -eu
cd {_TREE}
./configure --prefix=/usr --libdir="/usr/lib/$(gcc -print-multiarch)" --sysconfdir=/etc/slurm --localstatedir=/var \\
    --enable-multiple-slurmd --enable-silent-rules --with-munge --without-rpath --disable-slurmrestd --disable-debug \\
    CFLAGS="-O1 -g0 -w"
make --jobs "$(nproc)"
make install DESTDIR={_OUTPUT}
"""


@dataclass(frozen=True)
class Tree:
    """The source of one version of Slurm.

    Attributes:
        directory: A Git repository, or a tree as an archive holds it.
        commit: What to take from the repository; "" for a tree.
        version: Slurm's version, such as 25.11.7 or 26.11.0-rc1.
        digest: Names the content.
    """

    directory: Path
    commit: str
    version: str
    digest: str


def find_tree(directory: Path, release: str = "") -> Tree:
    """Find the source of a release, a tag or commit of a Git repository; of a plain tree, which holds just one, "".

    Raises:
        UsageError: There is no source of Slurm, or no such release of it.
    """
    tip = _git(directory, "rev-parse", "--verify", "--quiet", f"{release or 'HEAD'}^{{commit}}")
    if tip:
        commit = tip.strip()
        return Tree(directory, commit, _version(_git(directory, "show", f"{commit}:META"), directory), commit)
    if release:
        tags = _git(directory, "tag", "--list", "slurm-*", "--sort=-version:refname").split()
        choices = f"choose a tag such as {', '.join(tags[:5])}" if tags else f"{directory} must be a Git repository"
        raise UsageError(f"--release {release!r} is unknown: {choices}")
    meta = directory / "META"
    return Tree(directory, "", _version(meta.read_text() if meta.is_file() else "", directory), _digest(directory))


def _git(directory: Path, *command: str) -> str:
    """Return the output of a Git command, "" if it fails: a repository around `directory` does not count."""
    line = _git_line(directory, *command)
    done = subprocess.run(line, capture_output=True, text=True, errors="replace", check=False)
    return done.stdout if done.returncode == 0 else ""


def _git_line(directory: Path, *command: str) -> list[str]:
    repository = directory / ".git" if (directory / ".git").exists() else directory
    return ["git", f"--git-dir={repository}", *command]  # named, as Git would also find one around the directory


def _version(meta: str, directory: Path) -> str:
    """Return the version that a file META names: a release candidate's has more after a dash."""
    said: dict[str, str] = dict(re.findall(r"^\s*(Name|Version|Release):\s*(\S+)", meta, re.MULTILINE))
    if said.get("Name") != "slurm" or not re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+", said.get("Version", "")):
        raise UsageError(
            f"--from-source {directory} must be a Git repository or a source tree of Slurm, with its file META"
        )
    candidate = re.search(r"rc[0-9]+$", said.get("Release", ""))
    return said["Version"] + (f"-{candidate[0]}" if candidate else "")


def _digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(directory)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def ensure_built(tree: Tree, progress: Progress) -> Suite:
    """Return the suite of a source tree, which is built first if the cache lacks it."""
    base = builds.ensure_rootfs(SOURCE_BASE, progress)
    recipe = hashlib.sha256("\n".join((base.directory.name, tree.digest, _COMPILE)).encode()).hexdigest()[:12]
    name = f"{SOURCE_PREFIX}{tree.version}-{recipe}"
    build = Build(_suite(name), builds_dir() / name)
    with locked_directory(builds_dir() / "build.lock", progress, "another process that is building a sandbox"):
        if not build.complete:
            with builds.building(build) as temporary:
                _build(tree, base, temporary, progress)
    return build.suite


def _suite(directory: str) -> Suite:
    suite = replace(SOURCE_BASE, name=directory.rpartition("-")[0], built=directory)
    if _order(suite) < _SHARES_ITS_SOCKET:
        suite = replace(suite, auth="munge")
    return suite if _order(suite) >= _CGROUPS_CAN_BE_DISABLED else replace(suite, cgroup_conf="")


def _build(tree: Tree, base: Build, temporary: Path, progress: Progress) -> None:
    progress.step(f"building Slurm {tree.version} from {tree.directory} (first time only, five to ten minutes)")
    source, installed = temporary / "source", temporary / "installed"
    export(tree, source)
    installed.mkdir()
    plan = Plan(
        lower=str(base.root),
        mountpoint=str(temporary / "mnt"),
        binds=(Bind(str(source), _TREE, read_only=False), Bind(str(installed), _OUTPUT, read_only=False)),
        files=(TextFile(_SCRIPT, _COMPILE, 0o755),),
        command=("/bin/sh", _SCRIPT),
        environment={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8"},
    )
    log = builds_dir() / f"{SOURCE_PREFIX}{tree.version}.log"
    try:
        with log.open("w", encoding="utf-8") as stream, namespace.run_plan(plan, temporary / "plan.json") as lines:
            for line in lines:
                stream.write(line)
                progress.detail(f"Slurm {tree.version}: {line.strip()[:80]}")
    except subprocess.CalledProcessError as err:
        raise BuildError(f"Slurm {tree.version} could not be built; see {log}") from err
    # Hard links: roots are never written to, so the releases share what is not Slurm's.
    root = temporary / "root"
    for command in (["cp", "-al", str(base.root), str(root)],
                    ["cp", "-a", "--remove-destination", f"{installed}/.", str(root)],
                    ["ldconfig", "-r", str(root)]):  # fmt: skip
        subprocess.run(command, check=True)
    shutil.copy(source / "config.h", temporary)  # which Slurm's own tests read
    for directory in (source, installed, temporary / "mnt"):
        shutil.rmtree(directory, ignore_errors=True)


def export(tree: Tree, target: Path) -> None:
    """Write the tree to a directory that does not exist yet."""
    if not tree.commit:
        shutil.copytree(tree.directory, target, symlinks=True)
        return
    target.mkdir()
    with tempfile.TemporaryFile() as archive:
        line = _git_line(tree.directory, "archive", "--format=tar", tree.commit)
        subprocess.run(line, stdout=archive, check=True)
        archive.seek(0)
        subprocess.run(["tar", "--extract", "--directory", str(target)], stdin=archive, check=True)


def suite_named(name: str) -> Suite:
    """Find a suite of Debian's, or one that was built from source by its version or release.

    Raises:
        UsageError: There is none.
    """
    if name in SUITES:
        return SUITES[name]
    found = built_from_source()
    matching = [suite for suite in found if suite.name == name or suite.name.startswith(f"{name}.")]
    if name.startswith(SOURCE_PREFIX) and matching:
        return matching[-1]
    choices = ", ".join(sorted({*SUITES, *(suite.name for suite in found)}))
    hint = "; `muri-sandbox build --from-source` makes others" if name.startswith(SOURCE_PREFIX) else ""
    raise UsageError(f"--suite {name!r} is unknown: choose one of {choices}{hint}")


def built_from_source() -> list[Suite]:
    """Return the suites in the cache that were built from source, the newest version last, one of each version."""
    directories = sorted(builds_dir().glob(f"{SOURCE_PREFIX}[0-9]*-*"), key=lambda directory: directory.stat().st_mtime)
    suites = (_suite(each.name) for each in directories if Build(SOURCE_BASE, each).complete)
    return sorted({suite.name: suite for suite in suites}.values(), key=_order)


def _order(suite: Suite) -> list[int]:
    return [int(part) for part in suite.name.split("-")[1].split(".")]
