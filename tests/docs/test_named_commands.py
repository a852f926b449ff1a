"""The commands, options and keys of muri.yaml that pages name are those that there are."""

import re
from pathlib import Path

import click
import pytest

from muri.cli import cli
from muri.slurm_plugin.cli.admin import controller
from muri.slurm_plugin.config import Config, keys_of
from muri_lab.cli import cli as lab

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS: dict[str, click.Command] = {"muri": cli, "muri-lab": lab, "muri-controller": controller}
NAMED = re.compile(r"(?:^ {4}(?:\$ )?|`|\bsrun [^`\n]*?)(muri(?:-lab|-controller)?)((?: +[^\s`#|;&]+)+)", re.MULTILINE)


def wrong(program: str, words: list[str]) -> str:
    """Return the names of a command line that do not exist."""
    command = COMMANDS[program]
    while isinstance(command, click.Group) and words and re.fullmatch(r"[a-z][a-z-]*", words[0]):
        found = command.get_command(click.Context(command), words[0])
        if found is None:
            return f"{program}: no command {words[0]}"
        command, words = found, words[1:]
    known = {each for option in command.params for each in (*option.opts, *option.secondary_opts)} | {
        "--help",
        "--version",
    }
    ends = words.index("--") if "--" in words else len(words)
    used = (
        []
        if command.name == "run"
        else [word.split("=")[0].rstrip(",.)") for word in words[:ends] if word.startswith("--")]
    )
    missing = [option for option in used if option not in known and not isinstance(command, click.Group)]
    return f"{program} {command.name}: no option {', '.join(missing)}" if missing else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_commands_exist_and_have_their_options(page: Path) -> None:
    text = re.sub(r"\\\n +", " ", page.read_text(encoding="utf-8"))
    found = {wrong(program, words.split()) for program, words in NAMED.findall(text)}
    assert found <= {""}


def test_named_keys_exist() -> None:
    keys = {key for key, _ in keys_of(Config)}
    sections = "|".join({key.partition(".")[0] for key in keys if "." in key} | {"events", "profiles"})
    named = {
        (page.name, key)
        for page in PAGES
        for key in re.findall(rf"`((?:{sections})\.[a-z_]+)\b", page.read_text("utf-8"))
    }
    assert {(page, key) for page, key in named if key not in keys} <= {("profiles.md", "profiles.db")}
    assert len(named) > 10
