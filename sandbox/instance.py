"""One running sandbox: bring it up, find it, run commands in it, take it down."""

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sandbox import cluster, host, namespace, paths
from sandbox.cluster import Shape
from sandbox.errors import NotRunningError, StartError
from sandbox.locks import locked_directory
from sandbox.paths import CHECKOUT, InstancePaths
from sandbox.plan import Bind, Plan, TextFile
from sandbox.progress import Progress
from sandbox.pyslurm_build import Pyslurm, ensure_pyslurm
from sandbox.rootfs import USERS, Build, ensure_rootfs
from sandbox.suites import Suite

_SLURM_DIRECTORIES = ("/etc/slurm", "/var/spool/slurmctld", "/var/spool/slurmd", "/var/log/slurm", "/run/munge")


@dataclass(frozen=True)
class Instance:
    """What `up` recorded.

    Attributes:
        pid: The first process's id on the host.
        start_ticks: When it started, so that a reused id is noticed.
        phase: "starting" until the cluster has answered, then "up".
        pyslurm_reason: Why there is no pyslurm, if there is none.
        spank: Whether Muri's SPANK plugin was compiled and installed.
        job_submit: Whether Muri's job_submit file was installed.
    """

    name: str
    suite: str
    slurm_version: str
    nodes: int
    gpus_per_node: int
    cpus_per_node: int
    pid: int
    start_ticks: int
    started_utc: str
    phase: str = "starting"
    pyslurm: bool = False
    pyslurm_reason: str = ""
    spank: bool = False
    job_submit: bool = False

    @property
    def alive(self) -> bool:
        """Whether its first process still runs."""
        return namespace.start_ticks(self.pid) == self.start_ticks

    def save(self) -> None:
        """Record this instance."""
        target = InstancePaths(self.name).state
        temporary = target.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        temporary.rename(target)

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can carry."""
        return asdict(self)


def load(name: str) -> Instance | None:
    """Return the recorded instance, whether alive or not; None if there is none."""
    try:
        document = json.loads(InstancePaths(name).state.read_text(encoding="utf-8"))
        return Instance(**document)
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None


def require(name: str) -> Instance:
    """Return a running instance or say how to start one."""
    instance = load(name)
    if instance is None or not instance.alive:
        option = "" if name == "default" else f" --name {name}"
        raise NotRunningError(f"the sandbox {name!r} is not up: start it with `muri-sandbox up{option}`")
    return instance


def names() -> list[str]:
    """Return the names of all recorded instances."""
    return sorted(path.parent.name for path in paths.instances_dir().glob("*/instance.json"))


def root_plan(name: str, suite: Suite, shape: Shape, build: Build, pyslurm: Pyslurm) -> Plan:
    """Return the plan of an instance's root."""
    files = {**cluster.slurm_files(shape, suite, name), "/etc/hosts": cluster.hosts_file(shape)}
    secret = secrets.token_urlsafe(768)[:1024]
    key_file = "/etc/slurm/slurm.key" if suite.auth == "slurm" else "/etc/munge/munge.key"
    binds = [*host.python_binds(), *host.project_binds()]
    if pyslurm.directory:
        binds.append(Bind(str(pyslurm.directory), str(paths.PYSLURM_TARGET)))
    return Plan(
        lower=str(build.root),
        mountpoint=str(InstancePaths(name).mountpoint),
        binds=tuple(binds),
        files=(
            *(TextFile(path, text) for path, text in files.items()),
            TextFile(key_file, secret, 0o600),
        ),
        directories=(*_SLURM_DIRECTORIES, *(f"/var/spool/slurmd/{node}" for node in shape.node_names)),
        device_files=shape.device_files,
        hostname="ctl",
        private_network=True,
    )


def environment_for(user: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a command inside: a login's, the project's venv, and pyslurm."""
    home = "/root" if user == "root" else f"/home/{user}"
    path = f"{CHECKOUT}/.venv/bin:{host.python_executable().parent}:/usr/local/sbin:/usr/local/bin"
    inherited = {
        key: value for key, value in os.environ.items()
        if key in {"TERM", "LANG", "COLUMNS", "PYTHONHASHSEED"} or key.startswith("MURI_")
    }  # fmt: skip
    return {
        "LANG": "C.UTF-8", **inherited, "HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/bash",
        "PATH": f"{path}:/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(paths.PYSLURM_TARGET),
        **(extra or {}),
    }  # fmt: skip


def command_line(instance: Instance, user: str, command: list[str], working_directory: str | None = None,
                 extra: Mapping[str, str] | None = None) -> list[str]:  # fmt: skip
    """Return the host command line that runs `command` inside an instance as a user."""
    environment = environment_for(user, extra)
    inside = Path(f"/proc/{instance.pid}/root")
    wanted = working_directory or str(Path.cwd())
    there = wanted if (inside / wanted.lstrip("/")).is_dir() else environment["HOME"]
    return namespace.enter_command(instance.pid, user, command, environment, there)


def run(instance: Instance, *command: str, user: str = "root") -> subprocess.CompletedProcess[str]:
    """Run a command inside and return its outcome, for the sandbox's own use."""
    line = command_line(instance, user, list(command), working_directory="/")
    return subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def up(name: str, suite: Suite, shape: Shape, progress: Progress) -> tuple[Instance, bool]:
    """Start an instance, building what is missing; a running one is left as it is.

    Returns:
        The instance, and whether it was started just now.
    """
    files = InstancePaths(name)
    host.require_tools({"unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"})
    build = ensure_rootfs(suite, progress)
    pyslurm = ensure_pyslurm(build, progress)
    with locked_directory(files.directory, progress, f"another process that handles the sandbox {name!r}"):
        present = load(name)
        if present and present.alive and present.phase == "up":
            return present, False
        if present:
            namespace.end(present.pid, present.start_ticks)
        try:
            return _start(name, suite, shape, build, pyslurm, progress), True
        except BaseException:
            _remove(name)
            raise


def _start(name: str, suite: Suite, shape: Shape, build: Build, pyslurm: Pyslurm,
           progress: Progress) -> Instance:  # fmt: skip
    files = InstancePaths(name)
    progress.step(f"starting the sandbox {name!r}: Slurm {build.slurm_version}, {shape.nodes} nodes")
    pid = namespace.start_plan(root_plan(name, suite, shape, build, pyslurm), files.plan, files.log)
    instance = Instance(
        name, suite.name, build.slurm_version, shape.nodes, shape.gpus_per_node, shape.cpus_per_node,
        pid, namespace.start_ticks(pid) or 0,
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        pyslurm=pyslurm.directory is not None, pyslurm_reason=pyslurm.reason,
    )  # fmt: skip
    instance.save()
    if pyslurm.reason:
        progress.step(pyslurm.reason)
    from sandbox import daemons, plugins  # noqa: PLC0415  (they need this module)

    instance = replace(
        instance,
        spank=plugins.install_spank(instance, progress),
        job_submit=plugins.install_job_submit(instance, progress),
    )
    daemons.start(instance, suite, progress)
    instance = replace(instance, phase="up")
    instance.save()
    return instance


def down(name: str, progress: Progress) -> bool:
    """Take an instance down, leaving no process, mount or file; returns whether there was one."""
    files = InstancePaths(name)
    if not files.directory.exists():
        return False
    with locked_directory(files.directory, progress, f"another process that handles the sandbox {name!r}"):
        existed = load(name) is not None
        _remove(name)
    return existed


def _remove(name: str) -> None:
    instance = load(name)
    if instance:
        namespace.end(instance.pid, instance.start_ticks)
    shutil.rmtree(InstancePaths(name).directory, ignore_errors=True)
    if InstancePaths(name).directory.exists():
        raise StartError(f"could not remove {InstancePaths(name).directory}; is something in it still open?")


__all__ = ["USERS", "Instance", "command_line", "down", "load", "names", "require", "run", "up"]
