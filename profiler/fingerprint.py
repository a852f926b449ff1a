"""A name for a model that nobody named: its script and what makes two runs of it alike."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

DIGITS: Final = 8


def fingerprint(name: str, parts: Iterable[bytes]) -> str:
    """A readable name and a hash of everything else: "train.py@3f9ac2d1".

    Args:
        name: What people call it.
        parts: What must be equal for two runs to count as the same model, in order.
    """
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)  # with its length: "a", "b" is not "ab"
    return f"{name}@{whole.hexdigest()[:DIGITS]}"


def of_command(command: Sequence[str]) -> str:
    """The fingerprint of a training command: the script's content and its arguments.

    Args:
        command: A script and its arguments, or "-m", a module and its arguments. Of a module that is not below the
            working directory only the name counts, not the content.
    """
    module = command[0] == "-m"
    target, *arguments = command[1:] if module else command
    paths = _module_paths(target) if module else [Path(target)]
    content = next((path.read_bytes() for path in paths if path.is_file()), b"")
    name = target if module else Path(target).name
    return fingerprint(name, [content, *(argument.encode(errors="surrogateescape") for argument in arguments)])


def _module_paths(module: str) -> list[Path]:
    base = Path(*module.split("."))
    return [base.with_suffix(".py"), base / "__main__.py"]
