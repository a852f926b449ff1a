"""Reads the command line of `muri run`: its own options, then Python's line of options, program and arguments."""

import os
import re
import shlex
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from muri.errors import UsageError
from muri.launcher.job.script import NAMELESS

FLAGS: Final = "bBdOPqRsuv"
"""Python's options without a value that scripts may have."""

VALUED: Final = "WX"
"""Those with a value."""

_REFUSED: Final = {
    "E": "Muri reaches a script's Python through PYTHONPATH",
    "I": "Muri reaches a script's Python through PYTHONPATH",
    "S": "Muri is among the packages that it leaves out",
    "i": "a job has no terminal",
    "x": "it is for scripts of DOS",
}
_PYTHON: Final = re.compile(r"python(\d+(\.\d+t?)?)?")


class TargetError(UsageError):
    """The given script does not exist, or is none."""


@dataclass(frozen=True)
class PythonLine:
    """A command line.

    Attributes:
        own: The options of `muri run` itself.
        options: Those of Python, as Python takes them.
        module: Whether `target` is a module.
        target: A script, a module, or one of `NAMELESS`.
        arguments: What follows.
        python: The Python that it begins with, or whose console script it names; "" when it leaves that open.
    """

    own: tuple[str, ...]
    options: tuple[str, ...]
    module: bool
    target: str
    arguments: tuple[str, ...]
    python: str = ""


def read_line(words: Sequence[str], valued: Collection[str], flags: Collection[str]) -> PythonLine:
    """Take a command line apart.

    Args:
        words: What follows `muri run`.
        valued: Long options of `muri run` that take a value.
        flags: Its other options.

    Raises:
        click.UsageError: An option is unknown, or lacks its value.
        TargetError: It names no script that Python could run.
    """
    rest = list(words)
    own = _taken(rest, valued, flags)
    ends = rest[:1] == ["--"]
    del rest[:ends]
    python = rest.pop(0) if rest and not ends and _is_python(rest[0]) else ""
    options: list[str] = []
    while rest and not ends and rest[0].startswith("-") and rest[0] not in NAMELESS:
        word = rest.pop(0)
        if word.startswith("--"):
            raise click.NoSuchOption(word, f"Option {word} must stand before Python's own.")
        found, end = _options_of(word, rest)
        options += found
        if end:
            module, target = (True, rest.pop(0)) if end == "-m" else (False, end)
            return PythonLine(own, tuple(options), module, target, tuple(rest), python)
    if not rest:
        return PythonLine(own, tuple(options), False, "", (), python)
    target, its_python = (rest[0], "") if rest[0] in NAMELESS else _script(rest[0])
    return PythonLine(own, tuple(options), False, target, tuple(rest[1:]), python or its_python)


def _taken(rest: list[str], valued: Collection[str], flags: Collection[str]) -> tuple[str, ...]:
    """Take the options of `muri run` from the front of a line."""
    own: list[str] = []
    while rest and (rest[0] in flags or (rest[0].startswith("--") and rest[0] != "--")):
        name, has_value, _ = rest[0].partition("=")
        if name not in {*valued, *flags}:
            raise click.NoSuchOption(name, possibilities=sorted({*valued, *flags}))
        width = 2 if name in valued and not has_value else 1
        own += rest[:width]
        del rest[:width]
    return tuple(own)


def _options_of(word: str, rest: list[str]) -> tuple[list[str], str]:
    """Read a word of one-letter options.

    Args:
        word: The word.
        rest: What follows; a value is taken from it.

    Returns:
        The options, and "-c" or "-m" where that ends them.
    """
    options: list[str] = []
    for place, letter in enumerate(word[1:], start=2):
        if letter in _REFUSED:
            raise click.UsageError(f"muri run takes no -{letter}: {_REFUSED[letter]}")
        if letter in VALUED or letter in "cm":
            if not word[place:] and not rest:
                raise click.BadOptionUsage(letter, f"Option '-{letter}' requires an argument.")
            value = word[place:] or rest.pop(0)
            if letter in "cm":
                rest.insert(0, value)
                return options, f"-{letter}"
            return [*options, f"-{letter}", value], ""
        if letter not in FLAGS:
            raise click.NoSuchOption(f"-{letter}")
        options.append(f"-{letter}")
    return options, ""


def _named(end: str, rest: Sequence[str]) -> tuple[bool, str, tuple[str, ...]]:
    return (True, rest[0], tuple(rest[1:])) if end == "-m" else (False, end, tuple(rest))


def _is_python(word: str) -> bool:
    """Whether a word calls a Python, and is not a folder that a script has filled."""
    known = shutil.which(word) is not None or os.sep not in word
    return bool(_PYTHON.fullmatch(Path(word).name)) and known and not Path(word, "__main__.py").exists()


def _script(word: str) -> tuple[str, str]:
    """The path of a script, and its Python if it is a program of PATH; a folder without `__main__.py` hides none.

    Raises:
        TargetError: There is none.
    """
    if word.endswith(".ipynb"):
        raise TargetError(f"{word} is a notebook; make a script of it first: jupyter nbconvert --to script {word}")
    is_script = Path(word).exists() and (not Path(word).is_dir() or Path(word, "__main__.py").exists())
    found = None if is_script or os.sep in word else shutil.which(word)
    if found is not None:
        python = _interpreter(Path(found))
        if not python:
            raise TargetError(f"{found} is not a Python program; call it without `muri run`, which runs Python scripts")
        return found, python
    if not Path(word).exists():
        raise TargetError(f"there is no script {word}; give its path, or -m and the name of a module")
    return word, ""


def _interpreter(program: Path) -> str:
    """The Python that the first lines of a program name, "" when they name none."""
    with program.open("rb") as file:
        first, second = (os.fsdecode(file.readline(4096)).strip() for _ in range(2))
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-")]
    elif words and Path(words[0]).name == "sh" and second.startswith("'''exec'"):  # pip's form where a path is long
        words = shlex.split(second.replace("'''exec'", ""))
    named = words[0] if words else ""
    return named if _PYTHON.fullmatch(Path(named).name) else ""
