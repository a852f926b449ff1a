"""Every directory, file and node name of the sandbox comes from here."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from sandbox.errors import UsageError

CHECKOUT = Path(__file__).resolve().parent.parent

#: Inside the sandbox.
PYSLURM_TARGET = Path("/opt/muri/pyslurm")
SPANK_TARGET = Path("/opt/muri/spank/muri_spank.so")
JOB_SUBMIT_TARGET = Path("/opt/muri/job_submit")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


def cache_dir() -> Path:
    """Where everything costly is kept, outside the checkout: `$MURI_CACHE` or `~/.cache/muri`."""
    configured = os.environ.get("MURI_CACHE")
    return Path(configured).expanduser().resolve() if configured else Path.home() / ".cache" / "muri"


def builds_dir() -> Path:
    """Where the root file systems are kept."""
    return cache_dir() / "sandbox"


def instances_dir() -> Path:
    """Where the running instances keep their state."""
    return builds_dir() / "run"


def node_names(count: int) -> tuple[str, ...]:
    """Return the names of that many nodes: n1, n2, and so on."""
    return tuple(f"n{number}" for number in range(1, count + 1))


@dataclass(frozen=True)
class InstancePaths:
    """The files of one instance on the host; `down` removes them all."""

    name: str

    def __post_init__(self) -> None:
        """Refuse names that are no plain file names."""
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"--name {self.name!r} is no valid name: "
                "use up to 32 letters, digits, '-' and '_', beginning with a letter or digit"
            )

    @property
    def directory(self) -> Path:
        """The instance's own directory."""
        return instances_dir() / self.name

    @property
    def state(self) -> Path:
        """What `up` recorded about the instance."""
        return self.directory / "instance.json"

    @property
    def plan(self) -> Path:
        """The mounts and files that the instance's first process makes."""
        return self.directory / "plan.json"

    @property
    def mountpoint(self) -> Path:
        """Where the instance's root is mounted, seen only inside its mount namespace."""
        return self.directory / "mnt"

    @property
    def log(self) -> Path:
        """What the instance's first process printed."""
        return self.directory / "init.log"
