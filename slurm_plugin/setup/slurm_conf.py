"""What Muri needs of slurm.conf and gres.conf, and the edits that bring it there. Pure: texts in, texts out.

Slurm takes the last of two lines with the same key, and refuses a node that is named twice. So an own file, included
from slurm.conf, could not add to what the site says: where a site has such a line, a word is added to that line.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muri.errors import MuriError
from muri.slurm_plugin.setup.marks import note_of, with_block

GRES_NAME: Final = "muri"
GRES_COUNT: Final = 64
"""Members and pilot jobs that a node can have at the same time."""

LICENSE: Final = "muri_gate:1000000"

_WORD: Final = re.compile(r'(?:(?<=\s)|^)(?P<key>[A-Za-z_]+)\s*=\s*(?P<quote>"?)(?P<value>[^"\s]*)(?P=quote)')
_INCLUDE: Final = re.compile(r"(?i)^\s*include\s+(\S+)")


class SetupError(MuriError):
    """Slurm's configuration is not in a form that can be completed; the text says what to do by hand."""


@dataclass(frozen=True)
class Word:
    """One KEY=VALUE of a file.

    Attributes:
        file: Where it stands.
        first_line: Index of the first physical line of its logical line, which is continued by backslashes.
        line: Index of its own physical line.
        end: Column behind the value, where an item can be added.
    """

    file: Path
    first_line: int
    line: int
    key: str
    value: str
    end: int

    @property
    def items(self) -> list[str]:
        """The parts of a list."""
        return [item.strip() for item in self.value.split(",") if item.strip()]


def included(text: str) -> list[str]:
    """Return the names of the files that a configuration file includes, as they are written."""
    return [found[1] for found in map(_INCLUDE.match, text.splitlines()) if found]


def words_of(file: Path, text: str) -> Iterator[list[Word]]:
    """Yield the words of each logical line."""
    words: list[Word] = []
    first = 0
    for number, line in enumerate(text.splitlines()):
        content = re.split(r"(?<!\\)#", line, maxsplit=1)[0]
        body = content.rstrip()
        words += [
            Word(file, first, number, found["key"].lower(), found["value"], found.end("value"))
            for found in _WORD.finditer(body.removesuffix("\\"))
        ]
        if body.endswith("\\"):
            continue
        yield words
        words, first = [], number + 1
    yield words


@dataclass(frozen=True)
class Reading:
    """What matters of slurm.conf and the files that it includes.

    Attributes:
        last: Each global key's last word, which is the one that counts.
        gpu_gres: The Gres words of nodes (or of defaults of nodes) with GPUs.
        gpu_nodes: The names of these nodes, in Slurm's notation.
    """

    last: Mapping[str, Word]
    gpu_gres: tuple[Word, ...]
    gpu_nodes: tuple[str, ...]


def read(files: Mapping[Path, str]) -> Reading:
    """Read slurm.conf and its included files, in their order."""
    last: dict[str, Word] = {}
    gres: list[Word] = []
    nodes: list[str] = []
    default: Word | None = None
    for file, text in files.items():
        for words in words_of(file, text):
            keys = {word.key: word for word in words}
            if "nodename" not in keys:
                if words:
                    last[words[0].key] = words[0]
                continue
            own = keys.get("gres")
            is_default = keys["nodename"].value.upper() == "DEFAULT"
            if is_default:
                default = own or default
            counted = own or default
            if counted is None or not any(item.split(":")[0] == "gpu" for item in counted.items):
                continue
            if own is not None:
                gres.append(own)
            if not is_default:
                nodes.append(keys["nodename"].value)
    return Reading(last, tuple(gres), tuple(nodes))


def with_slurm_conf(files: Mapping[Path, str], *, with_licence: bool) -> dict[Path, str]:
    """Return slurm.conf and its included files with what Muri needs.

    Args:
        files: The texts by their paths, slurm.conf first.
        with_licence: Whether a licence keeps waiting jobs; else Muri holds them.

    Raises:
        SetupError: No node has a GPU.
    """
    reading = read(files)
    if not reading.gpu_nodes:
        raise SetupError(
            f"no NodeName line of {next(iter(files))} has Gres=gpu:…: Muri is for nodes whose GPUs Slurm gives out"
        )
    added: list[tuple[Word, str]] = []
    lines: list[str] = []
    wanted = [("GresTypes", GRES_NAME), ("JobSubmitPlugins", "lua")]
    wanted += [("Licenses", LICENSE)] if with_licence else []
    for key, item in wanted:
        word = reading.last.get(key.lower())
        if word is None or not word.items:
            lines.append(f"{key}={item}")
        elif not any(_name(each) == _name(item) for each in word.items):
            added.append((word, f",{item}"))
    added += [
        (word, f",{GRES_NAME}:{GRES_COUNT}")
        for word in reading.gpu_gres
        if not any(_name(item) == GRES_NAME for item in word.items)
    ]
    texts = {file: _with_words(text, [each for each in added if each[0].file == file]) for file, text in files.items()}
    main = next(iter(files))
    if lines:
        texts[main] = with_block(texts[main], lines)
    return texts


def _name(item: str) -> str:
    return re.split("[:=]", item, maxsplit=1)[0].removeprefix("job_submit/")


def _with_words(text: str, added: list[tuple[Word, str]]) -> str:
    lines = text.splitlines(keepends=True)
    # From the end, so that the numbers of the lines before stay true.
    for word, addition in sorted(added, key=lambda each: (each[0].line, each[0].end), reverse=True):
        line = lines[word.line]
        lines[word.line] = line[: word.end] + addition + line[word.end :]
        lines.insert(word.first_line, note_of(addition, word.line - word.first_line + 1))
    return "".join(lines)


def with_gres_conf(files: Mapping[Path, str], main: Path, nodes: tuple[str, ...]) -> dict[Path, str]:
    """Return gres.conf and its included files with the GRES that counts who shares.

    Args:
        files: The texts by their paths; empty where there is no gres.conf.
        main: gres.conf.
        nodes: The nodes with GPUs.
    """
    names = {word.value for file, text in files.items() for words in words_of(file, text) for word in words
             if word.key == "name"}  # fmt: skip
    if GRES_NAME in names:
        return dict(files)
    line = f"NodeName={','.join(nodes)} Name={GRES_NAME} Count={GRES_COUNT} Flags=CountOnly"
    return {**files, main: with_block(files.get(main), [line])}
