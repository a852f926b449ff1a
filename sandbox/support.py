"""What all parts of the sandbox share: names of files and nodes, errors, progress lines, locks."""

import contextlib
import fcntl
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent

#: The host of slurmctld and, unless the sandbox is a site, of everything else.
CONTROLLER = "ctl"

#: Inside the sandbox.
PYSLURM_TARGET = Path("/opt/muri/pyslurm")
SPANK_TARGET = Path("/opt/muri/spank/muri_spank.so")
JOB_SUBMIT_TARGET = Path("/opt/muri/job_submit")
CLI_FILTER_TARGET = Path("/opt/muri/cli_filter")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


class SandboxError(Exception):
    """An error whose text says what failed and what to do; the command prints it and exits with `exit_code`."""

    exit_code = 1


class UsageError(SandboxError):
    """An option or argument is wrong."""

    exit_code = 2


class BuildError(SandboxError):
    """A step of building the cached parts failed."""


class StartError(SandboxError):
    """The cluster did not come up."""


class NotRunningError(SandboxError):
    """The command needs an instance that is up."""


def cache_dir() -> Path:
    """The folder of everything that is costly to build, outside the checkout: `$MURI_CACHE` or `~/.cache/muri`."""
    configured = os.environ.get("MURI_CACHE")
    return Path(configured).expanduser().resolve() if configured else Path.home() / ".cache" / "muri"


def builds_dir() -> Path:
    """The folder of the root file systems."""
    return cache_dir() / "sandbox"


def instances_dir() -> Path:
    """The folder of the running instances' state."""
    return builds_dir() / "run"


def node_names(count: int) -> tuple[str, ...]:
    """The names of this many nodes: n1, n2, and so on."""
    return tuple(f"n{number}" for number in range(1, count + 1))


@dataclass(frozen=True)
class InstancePaths:
    """The files of one instance on the host; `down` removes them all."""

    name: str

    def __post_init__(self) -> None:
        """Refuse names that are not plain file names."""
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"--name {self.name!r} is not a valid name: "
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
    def cgroup(self) -> str:
        """The parent of its nodes' cgroups in each hierarchy of the machine."""
        return f"muri-sandbox-{self.name}"

    @property
    def log(self) -> Path:
        """What the instance's first process printed."""
        return self.directory / "init.log"


class Progress:
    """Prints one line per step, and at most one line per `quiet_s` inside a step."""

    def __init__(self, quiet_s: float = 5.0) -> None:
        self._started = time.monotonic()
        self._last_line = float("-inf")
        self._quiet_s = quiet_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since this progress began."""
        return time.monotonic() - self._started

    def step(self, text: str) -> None:
        """Print a line now."""
        self._last_line = time.monotonic()
        print(f"[{self.elapsed_s:5.1f} s] {text}", file=sys.stderr, flush=True)

    def detail(self, text: str) -> None:
        """Print a line unless another one was printed a moment ago."""
        if time.monotonic() - self._last_line >= self._quiet_s:
            self.step(text)


@contextlib.contextmanager
def locked_directory(directory: Path, progress: Progress, waiting_for: str) -> Iterator[None]:
    """Hold an exclusive lock on a directory, made if missing; the body may remove the directory."""
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # removed by another process in between
        try:
            _wait_for_lock(descriptor, progress, waiting_for)
            if _same_file(descriptor, directory):
                yield
                return
        finally:
            os.close(descriptor)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def _wait_for_lock(descriptor: int, progress: Progress, waiting_for: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        progress.step(f"waiting for {waiting_for}")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
