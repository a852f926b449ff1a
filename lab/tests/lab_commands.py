"""`muri-lab …` for tests."""

from muri.commands import run_command
from muri_lab.cli import cli


def muri_lab(capsys, *arguments):
    """As the entry point does: exit code, stdout, stderr."""
    code = run_command(cli, [*map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err
