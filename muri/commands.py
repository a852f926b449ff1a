"""What all commands share: groups that import a command only when it is called, and errors as one message."""

import io
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from muri.errors import MuriError
from muri.inherited import settle
from muri.installed import OF_THE_CONTROLLER, what_plans
from muri.printable import printable_lines


class LazyCommand(NamedTuple):
    """Where a sub-command lives and the line that the group's `--help` shows for it."""

    target: str
    summary: str


class LazyGroup(click.Group):
    """A click group whose commands are imported only when they are called.

    Args:
        table: Names of the commands, in the order in which help lists them.
        attributes: Those of click.Group.
    """

    def __init__(self, *, table: Mapping[str, LazyCommand], **attributes: Any) -> None:
        super().__init__(**attributes)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module now."""
        if cmd_name not in self._table:
            return None
        target = self._table[cmd_name].target
        module_name, _, attribute = target.partition(":")
        command = getattr(import_module(module_name), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{target} is not a click command")
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names and help lines from the table alone: the user waits for them at each press of the key."""
        own = [
            CompletionItem(name, help=command.summary)
            for name, command in self._table.items()
            if name.startswith(incomplete)
        ]
        return own + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in self._table.items()])


def run_command(command: click.Command, arguments: Sequence[str] | None = None) -> int:
    """Run a click command and turn Muri's own errors into one message and an exit code.

    Args:
        command: The command to run.
        arguments: Its arguments; the process's own when None.

    Returns:
        The exit code: 0, that of the error, or the one that the command chose.
    """
    settle()
    _print_whatever_comes()
    try:
        result = command.main(args=arguments, standalone_mode=False)
    except MuriError as error:
        click.echo(f"muri: {printable_lines(str(error))}", err=True)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("muri: interrupted", err=True)
        return 130
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in OF_THE_CONTROLLER:
            raise
        click.echo(f"muri: this command {what_plans(module)}", err=True)
        return 1
    return result if isinstance(result, int) else 0


def _print_whatever_comes() -> None:
    """Let a character that the terminal's encoding lacks cost only itself, not the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
