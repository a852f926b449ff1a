"""A bare site on which Muri is installed as docs/install.md says, and removed as docs/removal.md says."""

import hashlib
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sandboxes import start

from sandbox import daemons, instance, packages
from sandbox.builds import ensure_rootfs
from sandbox.cluster import Shape
from sandbox.driver import Driver
from sandbox.source import suite_named
from sandbox.support import CHECKOUT, Progress, cache_dir

SHAPE = Shape(nodes=2, site=True, accounting=True, bare=True)
_FENCE = re.compile(r"^```sh (?P<where>[^\n]+)\n(?P<commands>.*?)^```$", re.MULTILINE | re.DOTALL)

#: The sandbox has no systemd: timers and mounts are for a site's machines.
_NOT_HERE = "systemctl "


@dataclass(frozen=True)
class Step:
    """One block of a page."""

    where: tuple[str, ...]  # On which kinds of hosts, and what else the page says of it
    commands: str  # typed by a person


def steps_of(page: str) -> list[Step]:
    """Read the commands of a page of the documentation."""
    text = (CHECKOUT / "docs" / page).read_text(encoding="utf-8")
    return [Step(tuple(found["where"].split()), found["commands"]) for found in _FENCE.finditer(text)]


def users_python() -> Path:
    """The directory of a Python that has PyTorch and not Muri, as a user's own environment does."""
    recipe = (CHECKOUT / ".venv/made").read_text().strip()
    return cache_dir() / f"venv-{recipe}" / "bin"


@contextmanager
def bare_site(suite: str, shape: Shape = SHAPE) -> Iterator[Driver]:
    """Start a sandbox that has nothing of Muri."""
    yield from start(suite, shape, f"install-{suite.replace('.', '')}")


def built(suite: str, revision: int = 1, kind: str = "deb") -> Path:
    """The packages of a suite."""
    progress = Progress()
    return packages.ensure_packages(ensure_rootfs(suite_named(suite), progress), (kind,), revision, progress)


def name_slurm(site: Driver) -> None:
    """Give a Slurm that no package brought the name that SchedMD's own packages have."""
    control = f"""Package: slurm-smd-client
Version: {site.instance.slurm_version}-1
Architecture: all
Maintainer: Test <test@localhost>
Description: stands in
"""
    for host in site.instance.host_names:
        site.write("/root/slurm/DEBIAN/control", control, user="root", on=host)
        command = "dpkg-deb -b slurm && dpkg -i slurm.deb && rm -r slurm slurm.deb"
        site.run("sh", "-ec", f"cd /root && {command}", user="root", on=host)


def hosts_of(site: Driver, where: tuple[str, ...]) -> list[str]:
    """Which hosts of the sandbox a page means."""
    nodes = list(site.instance.node_names)
    kinds = {"controller": ["ctl"], "login": ["login"], "nodes": nodes}
    return [host for kind, hosts in kinds.items() if kind in where for host in hosts]


def copy_packages(site: Driver, directory: Path, kind: str = "deb") -> None:
    """Put the packages where the page wants them: in the directory `muri` of root's home on each host."""
    for host in site.instance.host_names:
        target = site.instance.root_of(host) / "root/muri"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for file in directory.glob(f"*.{kind}"):
            shutil.copy(file, target)


#: An install or a removal by rpm alone. It knows nothing of the Python that dpkg installed.
RPM_INSTALL = "rpm --nodeps -U"
RPM_REMOVE = "rpm -e"


def by_rpm(command: str) -> str:
    """Return an rpm system's equivalent of a page's command; any other command as it is."""
    installed = re.sub(r"^apt-get install -y ", f"{RPM_INSTALL} ", command)
    return re.sub(r"^apt-get purge -y ", f"{RPM_REMOVE} ", re.sub(r"_\*\.deb\b", "-[0-9]*.rpm", installed))


def follow(site: Driver, page: str, *, last: bool = False, rpm: bool = False) -> float:
    """Follow a page as root on each host; return the seconds that it took."""
    began_s = time.monotonic()
    for step in steps_of(page):
        if ("last" in step.where) != last:
            continue
        if "reconfigure" in step.where:
            let_slurm_read(site)
            continue
        lines = [line for line in step.commands.splitlines() if not line.startswith(_NOT_HERE)]
        if rpm:
            lines = [by_rpm(line) for line in lines]
        with ThreadPoolExecutor(2) as hosts_at_once:
            run = partial(site.run, "sh", "-ec", "\n".join(lines), user="root")
            list(hosts_at_once.map(lambda host, run=run: run(on=host), hosts_of(site, step.where) if lines else ()))
    return time.monotonic() - began_s


def let_slurm_read(site: Driver) -> None:
    """Do what the pages say for this release: `scontrol reconfigure`, or a restart of every daemon."""
    if site.instance.slurm_version >= "23.11":
        site.reconfigure()
    else:
        daemons.stop_controller(site.instance)
        for node in site.instance.node_names:
            site.run("pkill", "-f", f"slurmd -N {node}$", user="root", check=False)
            running = ("pgrep", "-f", f"slurmd -N {node}$")
            site.wait_until(lambda what=running: site.run(*what, check=False).returncode == 1, f"the end of {node}")
        instance.run(site.instance, "slurmctld")
        for node in site.instance.node_names:
            daemons.ensure_slurmd(site.instance, node, Progress())
    daemons.wait_until_idle(site.instance, Progress())


#: Where nothing of Muri may stay.
_TREES = ("/etc", "/usr", "/opt", "/var", "/run", "/home")
#: What changes by itself: daemons' state and logs, locks, package managers' own records.
_LIVING = re.compile(
    r"^/(var/(log|spool|lib/(dpkg|rpm|apt|munge|mysql)|cache)|run/(munge|mysqld|lock|slurm.*\.pid)|run/slurm"
    r"|etc/ld\.so\.cache|home|var/lib/systemd|usr/share/doc|etc/apt)\b"
)


def machine(site: Driver, host: str) -> dict[str, str]:
    """What lies on a host, by path: a hash of each file, and each directory and link."""
    root = site.instance.root_of(host)
    found = {}
    for tree in _TREES:
        for path in sorted((root / tree.lstrip("/")).rglob("*")):
            name = f"/{path.relative_to(root)}"
            if _LIVING.match(name) or "__pycache__" in name:
                continue
            if path.is_symlink():
                found[name] = f"link {path.readlink()}"
            elif path.is_file():
                state = path.stat()
                found[name] = f"{state.st_mode:o} {state.st_uid} {hashlib.sha256(path.read_bytes()).hexdigest()}"
            elif path.is_dir():
                found[name] = "directory"
    return found


_MOVING = re.compile(r"BOOT_TIME|Configuration data|NEXT_JOB_ID|HASH_VAL|.*\d\d:\d\d:\d\d|Slurmctld\(primary\)")


def slurm_itself(site: Driver) -> dict[str, str]:
    """What Slurm says of its configuration, licenses and reservations, without times, and of what nodes have."""
    said = {}
    for what in ("config", "licenses", "reservations"):
        text = site.run("scontrol", "show", what, user="root").stdout
        said[what] = "\n".join(line for line in text.splitlines() if not _MOVING.match(line.strip()))
    words = site.run("scontrol", "show", "nodes", user="root").stdout.split()
    said["nodes"] = "\n".join(word for word in words if word.startswith(("NodeName=", "Gres=", "CfgTRES=")))
    return said
