"""The plan of a sandbox's root: rendered first, carried out by `sandbox.init` afterwards."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bind:
    """A file or directory of the host shown inside; a source that does not exist is left out."""

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True)
class TextFile:
    """A file written inside."""

    path: str
    text: str
    mode: int = 0o644


@dataclass(frozen=True)
class Plan:
    """Everything the first process of a sandbox has to make.

    Attributes:
        lower: The cached root file system, never written to.
        mountpoint: Where the root is put together, on the host's path names.
        command: Run inside instead of staying as the reaper of orphans, with `environment`.
        report_fd: File descriptor that receives the host's process id once the root stands.
    """

    lower: str
    mountpoint: str
    binds: tuple[Bind, ...] = ()
    files: tuple[TextFile, ...] = ()
    directories: tuple[str, ...] = ()
    device_files: tuple[str, ...] = ()
    hostname: str = ""
    private_network: bool = False
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    working_directory: str = "/"
    report_fd: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can carry."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "Plan":
        """Rebuild a plan from `to_dict`."""
        values = dict(document)
        values["binds"] = tuple(Bind(**item) for item in document["binds"])
        values["files"] = tuple(TextFile(**item) for item in document["files"])
        for name in ("directories", "device_files", "command"):
            values[name] = tuple(document[name])
        return cls(**values)
