"""Writes a man page for each command of Muri from the command's own help: `generate_man_pages.py DIRECTORY`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from muri import __version__
from muri.cli import cli
from muri.commands import with_commands_below
from muri.slurm_plugin.cli.admin import controller


def page(command: click.Command, context: click.Context, section: int) -> str:
    """Return one command's page in roff."""
    name = context.command_path.replace(" ", "-")
    summary = command.get_short_help_str(200).rstrip(".")
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [
        f'.TH "{name.upper()}" "{section}" "" "Muri {__version__}" "Muri"',
        ".SH NAME", f"{_text(name)} \\- {_text(summary)}",
        ".SH SYNOPSIS", f"\\fB{_text(context.command_path)}\\fR {_text(usage)}",
        ".SH DESCRIPTION", *_paragraphs(command.help or ""),
    ]  # fmt: skip
    rows = [row for row in (each.get_help_record(context) for each in command.get_params(context)) if row]
    if rows:
        lines.append(".SH OPTIONS")
    for options, meaning in rows:
        lines += [".TP", f"\\fB{_text(options)}\\fR", _text(" ".join(meaning.split()))]
    if isinstance(command, click.Group):
        lines += [".SH SEE ALSO", *_see_also(command, context, name, section)]
    if command.epilog:
        lines += [".SH NOTES", *_paragraphs(command.epilog)]
    return "\n".join([*lines, ""])


def _see_also(command: click.Group, context: click.Context, name: str, section: int) -> list[str]:
    return [f".BR {_text(f'{name}-{each}')} ({section})" for each in command.list_commands(context)]


def _paragraphs(text: str) -> Iterator[str]:
    """Roff of a help text; a paragraph after click's mark \\b keeps its lines."""
    for number, paragraph in enumerate(text.replace("\r", "").split("\n\n")):
        if number:
            yield ".PP"
        if paragraph.lstrip().startswith("\b"):
            yield from (".nf", *map(_text, paragraph.lstrip().removeprefix("\b").strip("\n").splitlines()), ".fi")
        else:
            yield _text(" ".join(paragraph.replace("\f", "").split()))


def _text(text: str) -> str:
    """Text that roff prints as it is."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped[:1] in {".", "'"} else escaped


def main(directory: Path) -> None:
    """Write all pages."""
    directory.mkdir(parents=True, exist_ok=True)
    for root, name, section in ((cli, "muri", 1), (controller, "muri-controller", 8)):
        for command, context in with_commands_below(root, click.Context(root, info_name=name)):
            file = directory / f"{context.command_path.replace(' ', '-')}.{section}"
            file.write_text(page(command, context, section), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
