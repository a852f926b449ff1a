"""Telling an option of the command line from the same option in the job script."""

import ctypes
import subprocess

import pytest
from option_sources import SPANK_SOURCE


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("origin") / "origin.so"
    source = SPANK_SOURCE / "facts.c"
    subprocess.run(["cc", "-std=c11", "-shared", "-fPIC", "-o", target, source], check=True)
    loaded = ctypes.CDLL(str(target))
    loaded.muri_argument_is.restype = ctypes.c_bool
    loaded.muri_argument_is.argtypes = [
        ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p,
    ]  # fmt: skip
    return loaded


def ask(library: ctypes.CDLL, command: list[str], index: int, name: str, value: str | None) -> bool:
    text = b"".join(argument.encode() + b"\0" for argument in command)
    wanted = None if value is None else value.encode()
    return bool(library.muri_argument_is(text, len(text), index, name.encode(), wanted))


COMMAND = ["sbatch", "--muri=model=a", "--no-muri", "--muri", "--mur=alone", "-N1", "a.sh", "--muri=model=a"]


@pytest.mark.parametrize(
    ("index", "name", "value", "answer"),
    [
        (1, "muri", "model=a", True),
        (1, "muri", "model=b", False),
        (1, "no-muri", None, False),
        (2, "no-muri", None, True),
        (3, "muri", None, True),
        (4, "muri", "alone", True),
        (0, "muri", None, False),
        (8, "muri", None, False),
        (-1, "muri", None, False),
    ],
)
def test_argument_is(library: ctypes.CDLL, index: int, name: str, value: str | None, answer: bool) -> None:
    assert ask(library, COMMAND, index, name, value) is answer


def test_a_command_line_cut_short_is_not_read_beyond_its_end(library: ctypes.CDLL) -> None:
    assert library.muri_argument_is(b"sbatch\0--muri", 13, 1, b"muri", None) is False
    assert library.muri_argument_is(b"", 0, 0, b"muri", None) is False
