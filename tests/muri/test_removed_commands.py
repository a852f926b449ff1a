"""Commands and options of 0.2 that are gone say so, and what to use instead."""

import pytest

from muri.cli import REMOVED, cli
from muri.commands import run_command


@pytest.mark.parametrize("name", REMOVED)
def test_what_was_removed_says_what_to_use(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(cli, [*name.split(), "--json", "anything"]) == 2
    assert capsys.readouterr().err == f"muri: `muri {name}` was removed in 0.3: {REMOVED[name]}\n"


def test_a_slip_is_no_removed_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(cli, ["quue"]) == 2
    assert "No such command 'quue'; did you mean 'queue'?" in capsys.readouterr().err
    assert run_command(cli, ["queue", "--jsn"]) == 2
    assert "No such option" in capsys.readouterr().err
