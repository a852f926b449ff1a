"""The scripts of benchmarks/compatibility.py, read from compatibility_scripts.yaml."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of a script that would download data, asks for a GPU or sets no seed."""

    file: str  # The file, from the folder `src`
    old: str  # What must be in it
    new: str  # What replaces it


@dataclass(frozen=True, slots=True)
class Script:
    """One script."""

    name: str  # unique name
    source: str  # Its repository as `owner/name`, or the package that has it
    command: tuple[str, ...]  # It and its arguments, as after `python`; `bin/NAME` is a command of an installed package
    copies: Mapping[str, str] = field(default_factory=dict)  # Folders and files of the repository, and where they go
    data: tuple[tuple[str, str], ...] = ()  # kinds of compatibility_data.py, each with its folder
    texts: Mapping[str, str] = field(default_factory=dict)  # Small files that are put beside it
    edits: tuple[Edit, ...] = ()  # What is replaced in it
    environment: Mapping[str, str] = field(default_factory=dict)  # Variables of its own
    processes: int = 1  # processes that train or write at once: with several the order of lines is not a result
    cwd: str = "src"  # Where it runs

    @property
    def from_repository(self) -> bool:
        """Whether it comes from a cloned repository."""
        return "/" in self.source


def _script(entry: dict[str, Any]) -> Script:
    edits, data = (Edit(**edit) for edit in entry.get("edits", ())), map(tuple, entry.get("data", ()))
    return Script(
        **entry | {"command": tuple(shlex.split(entry["command"])), "edits": tuple(edits), "data": tuple(data)}
    )


SCRIPTS: Final = tuple(map(_script, yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))))

TWINS = (
    ("hf-trainer", "hf-trainer-accumulation"),
    ("accelerate-memory", "accelerate-accumulation"),
    ("nanogpt", "nanogpt-accumulation"),
    ("timm-train", "timm-train-accumulation"),
)
"""Pairs that differ in gradient accumulation and little else: what one keeps for its whole process harms the other."""
