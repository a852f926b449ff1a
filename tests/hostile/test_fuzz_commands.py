"""Every command that reads a file, on wrong files: a short message and an exit code, no traceback.

The commands and their files are found in the command line's own description, so that a new one is tried, too.
"""

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from muri.cli import cli
from muri.commands import run_command, with_commands_below

MOST_LETTERS = 2000  # A terminal's screen of text: what was wrong must not scroll away

BAD = {
    "deep.json": b"[\n" * 2_000,
    "deep.yaml": b"a: " + b"{a: " * 2_000,
    "deep.csv": b"[,\n" * 2_000,
    "list.json": b"[1, 2, 3]",
    "words.json": b'"words"',
    "digits.json": b"[" + b"9" * 5000 + b"]",
    "object.jsonl": b"[1]\n{}\n",
    "header.csv": "|".join(f"column{number}" for number in range(2000)).encode() + b"\n1|2\n",
    "commas.csv": b",".join([b"x" * 5000] * 3) + b"\n1,2,3\n",
    "one-line.txt": b"x" * 20_000,
    "binary": bytes(range(256)) * 4,
    "zeros": bytes(100),
}
WRITTEN = {"-o", "--out", "--save", "--trace"}
WORDS = {
    "explain": ["1"], "preempt": ["1"],
    "simulate": ["--policy", "fifo", "--nodes", "1", "--gpus-per-node", "4"],
    "trace generate": ["--jobs", "3", "--gpus", "4"], "profile run": ["true"],
    "profile set": ["a", "load_ms=1"],
}  # fmt: skip
"""Arguments of a command beside a file, such as a model."""


def calls() -> Iterator[list[str]]:
    """Command lines with FILE for a bad one."""
    for command, context in with_commands_below(cli, click.Context(cli, info_name="muri")):
        if isinstance(command, click.Group):
            continue
        name = context.command_path.removeprefix("muri ")
        files = [each for each in command.params if isinstance(each.type, click.Path)]
        models = ["a" for each in command.params if each.required and str(each.name).startswith("model")]
        for file in files:
            if WRITTEN & set(file.opts):
                continue
            words = [*name.split(), *WORDS.get(name, models)]
            for each in files:
                if each is file or each.required:
                    words += [each.opts[0], "FILE"] if isinstance(each, click.Option) else ["FILE"]
            yield words
    for form in ("muri", "muri-paper", "synergy", "philly", "helios", "pai", "sacct"):
        yield ["trace", "import", "--from", form, "--skip-bad-rows", "FILE"]


@pytest.mark.parametrize("words", [*calls()], ids=" ".join)
def test_a_bad_file_is_a_short_message(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, content in BAD.items():
        (tmp_path / name).write_bytes(content)
    # A profile store that is not there is one without profiles yet.
    for name in (*BAD, "folder", *([] if "--store" in words else ["missing"])):
        code = run_command(cli, [name if word == "FILE" else word for word in words])
        said = capsys.readouterr()
        assert code != 0, (name, said.err[:200])
        text = said.err
        if words[0] == "doctor":  # whose report on standard output begins with the file
            text += said.out.partition("\nWARNING")[0]
        assert 0 < len(text) < MOST_LETTERS, (name, text[:200])
        assert "Traceback" not in text, (name, text)
