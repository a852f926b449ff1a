"""Builds the C option parser once per session and wraps it for the tests."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from option_sources import SPANK_SOURCE, Outcome


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parser of options and the reader of command lines."""
    build = tmp_path_factory.mktemp("spank-build")
    command = ["make", "-s", "-C", str(SPANK_SOURCE), f"BUILD={build}", "muri_options", "muri_facts"]
    # The sanitizers turn a read or write out of bounds into a failed test.
    command.append("CFLAGS=-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all")
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return build


@pytest.fixture(scope="session")
def options(programs: Path) -> Callable[..., Outcome]:
    """Feed `layer:option` arguments to the parser."""

    def feed(*arguments: str) -> Outcome:
        command = [programs / "muri_options", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 2), done.stderr
        if done.returncode == 2:
            return Outcome(None, done.stderr)
        return Outcome(done.stdout.strip(), "")

    return feed
