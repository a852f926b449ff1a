"""Counts patterns of English that readers stumble over; fails where there are more than scripts/english.yaml allows.

    scripts/check_english.py            # compare with the allowances; a part of make check
    scripts/check_english.py --lower    # lower the allowances to the counts
    scripts/check_english.py --show launcher messages    # print each place

It looks at pages, at docstrings and comments ("words"), and at other texts in the code ("messages"). An allowance is a
count for each top-level folder. Moving a file to another folder is free: the check fails when the sum over all grows.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[1]
ALLOWANCES: Final = ROOT / "scripts" / "english.yaml"
KINDS: Final = ("pages", "words", "messages")

_STEMS: Final = (
    "utili|normali|organi|recogni|optimi|summari|initiali|minimi|maximi|seriali|generali|synchroni|prioriti|reali|discreti"
    "|locali|finali|speciali"
)

PATTERNS: Final = {
    "say who: users, members, no user": r"\b(?i:nobody|somebody|whom|whomever|whoever)\b",
    "name the thing instead of what it is": r"\b[Ww]hat (?:it|they|a|an)\b|(?:^|[.;:] )What (?:is|was|are|were|has|had"
    r"|does|did|can|cannot|could|must|may|stands|comes|goes|needs|makes|keeps|runs|waits)\b(?![^.]*\?)",
    "is not a …, must be a …": r"(?<![Tt]here )\b(?:is|are|be|was|were) (?:no|none)\b"
    r"(?! longer| more| less| later| larger)",
    "American spelling": rf"\b(?i:licen[c]e\w*|\w*(?:{_STEMS})s(?:e|ed|es|er|ing|ation|ations)"
    r"|(?:col|behavi|fav|neighb|hon|lab)our\w*|centre[ds]?|analys(?:ed|ing)|catalogue\w*|grey|labelled|modelled|travelled"
    r"|learnt|whilst)\b",
}
"""Patterns, by the advice that goes with each."""

_OUTSIDE: Final = re.compile(r"```.*?```|<!--.*?-->|`[^`]*`|^ {4}.*$|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
"""Code, marks and targets of links in pages."""

_GENERATED: Final = re.compile(r"(^|/)(releases|results|compatibility)\.md$|results/|recorded/|mutations/")
_C_TEXT: Final = re.compile(r'(?P<words>/\*.*?\*/|//[^\n]*|--[^\n]*)|(?P<messages>"(?:[^"\\\n]|\\.)*")', re.DOTALL)


def texts_of(name: str, source: str) -> Iterator[tuple[str, int, str]]:
    """Yield the kind, the line and the text of all that people read in a file."""
    if name.endswith(".md"):
        yield "pages", 1, _OUTSIDE.sub(lambda found: "\n" * found[0].count("\n"), source)
    elif name.endswith((".c", ".h", ".lua")):
        for found in _C_TEXT.finditer(source):
            yield found.lastgroup or "words", source.count("\n", 0, found.start()) + 1, found[0]
    elif name.endswith(".py"):
        yield from _of_python(source)


def _of_python(source: str) -> Iterator[tuple[str, int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield "words", token.start[0], token.string
    tree = ast.parse(source)
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield "words" if id(node) in told else "messages", node.lineno, node.value


def places() -> Iterator[tuple[str, str, str, str]]:
    """Yield folder, kind, place and advice of each match."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in sorted(set(listed)):
        path = ROOT / name
        if _GENERATED.search(name) or name.endswith("check_english.py") or not path.is_file():
            continue
        if not name.endswith((".md", ".py", ".c", ".h", ".lua")):
            continue
        folder = name.partition("/")[0] if "/" in name else "."
        for kind, line, text in texts_of(name, path.read_text(encoding="utf-8")):
            for advice, pattern in PATTERNS.items():
                for found in re.finditer(pattern, text, re.MULTILINE):
                    place = f"{name}:{line + text.count(chr(10), 0, found.start())}"
                    yield folder, kind, f"{place}: {' '.join(found[0].split())}", advice


def compare(counts: Counter[tuple[str, str]], allowances: dict[str, dict[str, int]]) -> list[str]:
    """Return a line for each kind of which there is more than allowed, in all folders together."""
    lines = []
    for kind in KINDS:
        found = sum(count for (_, each), count in counts.items() if each == kind)
        allowed = sum(allowed.get(kind, 0) for allowed in allowances.values())
        if found > allowed:
            grown = sorted(
                folder
                for (folder, each), count in counts.items()
                if each == kind and count > allowances.get(folder, {}).get(kind, 0)
            )
            lines.append(f"{kind}: {found} places, {allowed} allowed; more than before in {', '.join(grown)}")
    return lines


def main(arguments: list[str]) -> int:
    """Compare, lower or show; returns the exit status."""
    found = list(places())
    if arguments[:1] == ["--show"]:
        wanted = set(arguments[1:])
        shown = [each for each in found if not wanted or {each[0], each[1]} >= wanted]
        print(*(f"{place}  ({advice})" for _, _, place, advice in shown), sep="\n")
        return 0
    counts = Counter((folder, kind) for folder, kind, _, _ in found)
    if arguments == ["--lower"]:
        kept = {folder: {kind: counts[folder, kind] for kind in KINDS if counts[folder, kind]} for folder, _ in counts}
        head = "# Patterns of scripts/check_english.py that each folder still has; these counts may only fall.\n"
        ALLOWANCES.write_text(head + yaml.safe_dump(kept), encoding="utf-8")
        return 0
    lines = compare(counts, yaml.safe_load(ALLOWANCES.read_text(encoding="utf-8")))
    print(*lines, sep="\n", end="\n" if lines else "")
    if lines:
        print("scripts/check_english.py --show FOLDER KIND lists the places")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
