"""What all commands share: groups that import a command only when it is called, and errors as one message."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple

import click
from click.shell_completion import CompletionItem

from muri.errors import MuriError
from muri.inherited import settle
from muri.text import nearest, printable, printable_lines

_OF_FULL_DISKS: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class LazyCommand(NamedTuple):
    """Where a sub-command lives and the line that the group's `--help` shows for it."""

    target: str
    summary: str


class NoSuchCommandError(click.UsageError):
    """A group has no command of this name."""

    def __init__(self, message: str, ctx: click.Context, name: str) -> None:
        super().__init__(message, ctx)
        self.name: Final = name


class Group(click.Group):
    """A click group that names the command which a mistyped one may be."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; name the one that an unknown one may be a slip of."""
        name, known = args[0], self.list_commands(ctx)
        if name in known or name.startswith("-"):
            return super().resolve_command(ctx, args)
        near = nearest(name, known)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise NoSuchCommandError(f"No such command {name!r}{hint}", ctx, name)


class LazyGroup(Group):
    """A click group whose commands, in a table in the order of its help, are imported only when they are called."""

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
        names = [name for name in self._table if name.startswith(incomplete)]
        items = [CompletionItem(name, help=self._table[name].summary) for name in names]
        return items + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in self._table.items()])


def with_commands_below(
    command: click.Command, context: click.Context
) -> Iterator[tuple[click.Command, click.Context]]:
    """Yield a command and all commands below it; users type a context's `command_path`."""
    yield command, context
    if not isinstance(command, click.Group):
        return
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        if child is not None and not child.hidden:
            yield from with_commands_below(child, click.Context(child, info_name=name, parent=context))


def run_command(command: click.Command, arguments: Sequence[str] | None = None) -> int:
    """Run a click command and return its exit code; Muri's own errors become one message and their exit code.

    Without `arguments` it takes the process's own.
    """
    settle()
    _escape_unencodable()
    try:
        result = command.main(args=arguments, standalone_mode=False)
        sys.stdout.flush()
    except (MuriError, click.ClickException, click.Abort, ModuleNotFoundError, OSError) as error:
        result = _report(error)
    finally:
        _drop_unwritable_output()
    return result if isinstance(result, int) else 0


def _report(error: Exception) -> int:
    """Print one message about an error and return the exit code; an error that is a bug is raised again."""
    from muri.pythons import OF_THE_CONTROLLER, what_plans  # takes time to load

    code = error.exit_code if isinstance(error, (MuriError, click.ClickException)) else 1
    if isinstance(error, MuriError):
        _complain(printable_lines(str(error)))
    elif isinstance(error, click.ClickException):
        with contextlib.suppress(OSError):
            error.show()
    elif isinstance(error, click.Abort):
        _complain("interrupted")
        code = 130
    elif (
        isinstance(error, ModuleNotFoundError) and (module := (error.name or "").partition(".")[0]) in OF_THE_CONTROLLER
    ):
        _complain(f"this command {what_plans(module)}")
    elif isinstance(error, OSError) and (error.filename is not None or error.errno in _OF_FULL_DISKS):
        # Python names files when they are opened, not when they are written to.
        name = error.filename
        place = "the output could not be written" if name is None else printable(os.fsdecode(name))
        _complain(f"{place}: {error.strerror}")
    elif not isinstance(error, BrokenPipeError):  # its reader, such as `head`, has had enough
        raise error
    return code


def _complain(text: str) -> None:
    """Print an error; where standard error is broken, too, only the exit code shows it."""
    with contextlib.suppress(OSError):
        click.echo(f"muri: {text}", err=True)


def _drop_unwritable_output() -> None:
    """Leave no unwritable output for Python's exit, which would print a traceback and change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _escape_unencodable() -> None:
    """Print characters that the terminal's encoding lacks as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
