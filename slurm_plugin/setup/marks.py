"""Muri's marks in a site's files: added blocks, and words added to a line. Pure.

A block stands between two comments. Before a line to which a word was added stands a comment that names the word. So
the files themselves say how to restore them byte for byte, also after the site has changed other parts of them.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final

_BEGIN: Final = "begin muri: added by `muri setup --apply`, taken out by `muri setup --remove`"
_END: Final = "end muri"
_NEW_FILE: Final = " (new file)"
_NO_LINE_END: Final = " (the line before had no end)"
_ADDED: Final = re.compile(r'# muri setup added "([^"\n]+)" to line ([1-9]\d*) below this one\n')


def block(lines: Iterable[str], comment: str = "#", note: str = "") -> str:
    """Return lines between Muri's marks.

    Args:
        lines: What to add.
        comment: What begins a comment in this file.
        note: What the mark has to remember.
    """
    return "".join(f"{line}\n" for line in (f"{comment} {_BEGIN}{note}", *lines, f"{comment} {_END}"))


def with_block(text: str | None, lines: Sequence[str], comment: str = "#", place: int | None = None) -> str:
    """Return a file with a block added.

    Args:
        text: The file; None where there is none.
        lines: What to add.
        comment: What begins a comment in this file.
        place: Before which character; None: at the end.
    """
    if text is None:
        return block(lines, comment, _NEW_FILE)
    before, after = (text, "") if place is None else (text[:place], text[place:])
    if before and not before.endswith("\n"):
        return f"{before}\n{block(lines, comment, _NO_LINE_END)}{after}"
    return f"{before}{block(lines, comment)}{after}"


def note_of(word: str, number: int) -> str:
    """Return the comment that says which word was added to which of the lines below it (1: the next)."""
    return f'# muri setup added "{word}" to line {number} below this one\n'


def is_marked(text: str) -> bool:
    """Whether a file holds anything of Muri's."""
    return _BEGIN in text or _ADDED.search(text) is not None


def without_marks(text: str) -> str | None:
    """Return a file as it was before Muri; None where there was none."""
    kept: list[str] = []
    words: dict[int, str] = {}
    in_block = is_new = False
    for line in text.splitlines(keepends=True):
        note = _ADDED.fullmatch(line)
        if _BEGIN in line:
            in_block = True
            is_new = line.rstrip().endswith(_NEW_FILE)
            if kept and line.rstrip().endswith(_NO_LINE_END):
                kept[-1] = kept[-1].removesuffix("\n")
        elif in_block:
            in_block = _END not in line
        elif note:
            words[len(kept) + int(note[2]) - 1] = note[1]
        else:
            kept.append(line)
    for number, word in words.items():
        if number < len(kept):
            kept[number] = kept[number].replace(word, "", 1)
    rest = "".join(kept)
    return None if is_new and not rest.strip() else rest
