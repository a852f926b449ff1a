"""The record of a running sandbox, and commands run in it."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sandbox import host, namespace
from sandbox.support import (
    CHECKOUT,
    CONTROLLER,
    PYSLURM_TARGET,
    InstancePaths,
    NotRunningError,
    UsageError,
    instances_dir,
    node_names,
)


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
        accounting: Whether it has a database, accounts and limits.
        bare: Whether nothing of Muri is in it.
        hosts: The process of each host that has a root of its own; all else is on the controller, `ctl`.
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
    accounting: bool = False
    bare: bool = False
    hosts: Mapping[str, int] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        """Whether its first process still runs."""
        return namespace.start_ticks(self.pid) == self.start_ticks

    @property
    def node_names(self) -> tuple[str, ...]:
        """Return n1, n2, and so on."""
        return node_names(self.nodes)

    @property
    def host_names(self) -> tuple[str, ...]:
        """Return the hosts that have a root: the controller, `ctl`, and on a site the login host and the nodes."""
        return (CONTROLLER, *self.hosts)

    def host_of(self, node: str) -> str:
        """Return the host that a node's slurmd runs on."""
        return node if node in self.hosts else CONTROLLER

    def process_of(self, host: str) -> int:
        """Return the process that keeps a host's namespaces.

        Raises:
            UsageError: There is no such host; the text lists those there are.
        """
        if host not in self.host_names:
            raise UsageError(f"the sandbox {self.name!r} has no host {host!r}: choose one of "
                             + ", ".join(self.host_names))  # fmt: skip
        return self.hosts.get(host, self.pid)

    def root_of(self, host: str) -> Path:
        """Return where a host's root is seen from outside."""
        return Path(f"/proc/{self.process_of(host)}/root")

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
    return sorted(path.parent.name for path in instances_dir().glob("*/instance.json"))


def environment_for(user: str, extra: Mapping[str, str] | None = None, *, bare: bool = False) -> dict[str, str]:
    """Return the environment of a command inside: a login's and, unless it is bare, the project's venv and pyslurm."""
    home = "/root" if user == "root" else f"/home/{user}"
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    project = {} if bare else {
        "PATH": f"{CHECKOUT}/.venv/bin:{host.python_executable().parent}:{path}",
        "PYTHONPATH": str(PYSLURM_TARGET),
    }  # fmt: skip
    inherited = {
        key: value for key, value in os.environ.items()
        if key in {"TERM", "LANG", "COLUMNS", "PYTHONHASHSEED"} or key.startswith("MURI_")
    }  # fmt: skip
    return {
        "LANG": "C.UTF-8", **inherited, "HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/bash",
        "PATH": path, **project, **(extra or {}),
    }  # fmt: skip


def command_line(instance: Instance, user: str, command: list[str], working_directory: str | None = None,
                 extra: Mapping[str, str] | None = None, *, on: str = CONTROLLER) -> list[str]:  # fmt: skip
    """Return the command line that runs `command` on a host inside an instance as a user."""
    environment = environment_for(user, extra, bare=instance.bare)
    wanted = working_directory or str(Path.cwd())
    there = wanted if (instance.root_of(on) / wanted.lstrip("/")).is_dir() else environment["HOME"]
    return namespace.enter_command(instance.process_of(on), user, command, environment, there)


def run(
    instance: Instance, *command: str, user: str = "root", on: str = CONTROLLER
) -> subprocess.CompletedProcess[str]:
    """Run a command inside and return its outcome, for the sandbox's own use."""
    line = command_line(instance, user, list(command), working_directory="/", on=on)
    return subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
