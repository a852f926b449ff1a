"""Prints each place with a pattern of English that readers stumble over, and fails if there is one.

It looks at pages, at comments, docstrings and messages in the code, and at the spelling of names.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]

_STEMS: Final = (
    "utili|normali|organi|recogni|optimi|summari|initiali|minimi|maximi|seriali|generali|synchroni|prioriti|reali|discreti"
    "|locali|finali|speciali"
)

SPELLING: Final = "American spelling"

PATTERNS: Final = {
    "say who: users, members, no user": r"\b(?i:nobody|somebody|whom|whomever|whoever)\b",
    "name the thing instead of what it is": r"\b[Ww]hat (?:it|they|a|an)\b|(?:^|[.;:] )What (?:is|was|are|were|has|had"
    r"|does|did|can|cannot|could|must|may|stands|comes|goes|needs|makes|keeps|runs|waits)\b(?![^.]*\?)",
    "is not a …, must be a …": r"(?<![Tt]here )\b(?:is|are|be|was|were) (?:no|none)\b"
    r"(?! longer| more| less| later| larger| older)",
    SPELLING: rf"\b(?i:\w*(?:{_STEMS})s(?:e|ed|es|er|ing|ations?)\w*|\w*(?<!gate:)(?<!gate: )licence\w*"
    r"|\w*(?:col|behavi|fav|neighb|hon|lab)our\w*|\w*(?:centre[ds]?|analys(?:ed|ing)|catalogue|labelled|modelled|travelled"
    r"|learnt|whilst|grey)(?![^\W_])\w*)\b",
}
"""Patterns, by the advice that goes with each."""

_OUTSIDE: Final = re.compile(r"```.*?```|<!--.*?-->|`[^`]*`|^ {4}.*$|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
"""Code, marks and targets of links in pages."""

_UNREAD: Final = re.compile(
    r"(^|/)(releases|results|compatibility)\.md$|_english\.py$|(results|recorded|mutations|fixtures)/"
)
"""Pages that programs write, and files that quote faults or others' texts."""

_C_TEXT: Final = re.compile(r'/\*.*?\*/|//[^\n]*|--[^\n]*|"(?:[^"\\\n]|\\.)*"', re.DOTALL)


def faults(name: str, source: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the text and the advice of each match in a file."""
    for first, text, patterns in _texts(name, source):
        for advice, pattern in patterns.items():
            for found in re.finditer(pattern, text, re.MULTILINE):
                yield first + text.count("\n", 0, found.start()), " ".join(found[0].split()), advice


def _texts(name: str, source: str) -> Iterator[tuple[int, str, dict[str, str]]]:
    """Yield the line and the text of all that people read, with the patterns that do not belong there."""
    if name.endswith(".md"):
        yield 1, _OUTSIDE.sub(lambda found: "\n" * found[0].count("\n"), source), PATTERNS
    elif name.endswith((".c", ".h", ".lua")):
        for found in _C_TEXT.finditer(source):
            if " " in found[0]:
                yield source.count("\n", 0, found.start()) + 1, found[0], PATTERNS
    else:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string, PATTERNS
            elif token.type == tokenize.NAME:
                yield token.start[0], token.string, {SPELLING: PATTERNS[SPELLING]}
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield node.lineno, node.value, PATTERNS


def main() -> int:
    """Print the places; returns the exit status."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", "*.py", "*.c", "*.h", "*.lua"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    paths = [ROOT / name for name in sorted(set(listed)) if not _UNREAD.search(name)]
    places = [
        f"{path.relative_to(ROOT)}:{line}: {text}  ({advice})"
        for path in paths
        if path.is_file()
        for line, text, advice in faults(path.name, path.read_text(encoding="utf-8"))
    ]
    print(*places, sep="\n", end="\n" if places else "")
    return int(bool(places))


if __name__ == "__main__":
    sys.exit(main())
