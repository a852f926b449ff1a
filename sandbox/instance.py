"""The record of a running sandbox, and commands run in it."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sandbox import host, namespace
from sandbox.support import CHECKOUT, PYSLURM_TARGET, InstancePaths, NotRunningError, instances_dir, node_names


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

    @property
    def alive(self) -> bool:
        """Whether its first process still runs."""
        return namespace.start_ticks(self.pid) == self.start_ticks

    @property
    def node_names(self) -> tuple[str, ...]:
        """Return n1, n2, and so on."""
        return node_names(self.nodes)

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
        "PATH": f"{path}:/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(PYSLURM_TARGET),
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
