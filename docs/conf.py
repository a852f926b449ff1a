"""The site that `make docs` builds: these pages, the Python API from docstrings, keys and commands from the code."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
from pydantic import BaseModel
from sphinx.application import Sphinx

from muri.cli import cli
from muri.slurm_plugin.config import Config

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


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield a row of the table for each key of muri.yaml."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
        else:
            default = field.get_default(call_default_factory=True)
            shown = "" if default in ("", (), {}) or name == "node_python" else f"`{default}`"
            yield f"| `{prefix}{name}` | {shown} | {field.description} |"


def _commands(group: click.Group, path: str) -> Iterator[str]:
    """Yield a row of the table for each command."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}")
        elif command is not None and not command.hidden:
            yield f"| `{path} {name}` | {command.get_short_help_str(200)} |"


def _fill(app: Sphinx, name: str, source: list[str]) -> None:
    """Put the tables into the page that asks for them."""
    tables = {
        "keys": ["| key | default | meaning |", "|---|---|---|", *_keys(Config)],
        "commands": ["| command | purpose |", "|---|---|", *_commands(cli, "muri")],
    }
    for title, lines in tables.items():
        source[0] = source[0].replace(f"<!-- from the code: {title} -->", "\n".join(lines))


def setup(app: Sphinx) -> None:
    """Register with Sphinx."""
    app.connect("source-read", _fill)
