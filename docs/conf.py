"""The site that `make docs` builds: these pages, the Python API from docstrings, keys and commands from the code."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
from sphinx.application import Sphinx

from muri.cli import cli
from muri.commands import with_commands_below
from muri.slurm_plugin.config import Config, keys_of

ROOT = Path(__file__).resolve().parents[1]
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "Muri"
author = "The Muri authors"
version = release = _PROJECT["version"]
html_title = f"Muri {version}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

html_theme = "furo"
html_copy_source = False
html_show_copyright = False


def _keys() -> Iterator[str]:
    """Yield the table of the keys of muri.yaml, line by line."""
    yield from ("| key | default | meaning |", "|---|---|---|")
    for key, field in keys_of(Config):
        default = field.get_default(call_default_factory=True)
        shown = "" if default in ("", (), {}) or key == "node_python" else f"`{default}`"
        yield f"| `{key}` | {shown} | {field.description} |"


def _commands() -> Iterator[str]:
    """Yield the table of the commands, line by line."""
    yield from ("| command | purpose |", "|---|---|")
    for command, context in with_commands_below(cli, click.Context(cli, info_name="muri")):
        if not isinstance(command, click.Group):
            yield f"| `{context.command_path}` | {command.get_short_help_str(200)} |"


def _fill(app: Sphinx, name: str, source: list[str]) -> None:
    """Put the tables into the page that asks for them."""
    for title, lines in {"keys": _keys, "commands": _commands}.items():
        mark = f"<!-- from the code: {title} -->"
        if mark in source[0]:
            source[0] = source[0].replace(mark, "\n".join(lines()))


def setup(app: Sphinx) -> None:
    """Register with Sphinx."""
    app.connect("source-read", _fill)
