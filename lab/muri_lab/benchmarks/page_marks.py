"""Marks of the pages: comments that say where a figure or a table comes from, around what was written last.

    <!-- figure: scale:cycle-10k.figures.cpu_s .1f -->0.5<!-- /figure --> s
    <!-- figure: 1e3 * simulator:cases.trace.wall_s / simulator:cases.trace.decisions .1f -->1.0<!-- /figure --> ms
    <!-- figure: max fidelity:rows.makespan_s_error .1% -->8.9 %<!-- /figure -->
    <!-- figure: muri.policies.grouping.engine:COLUMN_LIMIT ,d -->1,000,000<!-- /figure -->
    <!-- table: policies -->
    …
    <!-- /table -->

A value is FILE:PATH, from results/FILE.json, or MODULE:NAME or MODULE:NAME(1,2), from the code. In a path `_` also
stands for a space, a number is an index, `[0:4]` a part of a list, `[name=value&…]` the first of it with these
values, `*` all values of a mapping; another name is asked of each of a list. Values may follow `max`, `min`, `mean`,
`sum`, `count` or `abs`, and are joined by + - * / from left to right. The last word is Python's format. Tables are
made by the functions of page_tables.py.
"""

import json
import re
import statistics
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[3]
RESULTS: Final = Path(__file__).with_name("results")
FIGURE: Final = re.compile(r"(<!-- figure: ([^>]+?) -->)([^<]*)(<!-- /figure -->)")
TABLE: Final = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)
_BEGINS_LINE: Final = re.compile(r"^ *(?:[-*] |\d+\. )?<!-- figure: ", re.MULTILINE)
_OPERATORS: Final[Mapping[str, Callable[[float, float], float]]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b,
}  # fmt: skip
_FOLDS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "max": max, "min": min, "mean": statistics.fmean, "sum": sum, "count": len, "abs": abs,
}  # fmt: skip


class PageError(Exception):
    """A mark is wrong; the text says how."""


@cache
def stored(name: str) -> Any:
    """A stored result."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise PageError(f"there is no {path.relative_to(ROOT)}")
    return json.loads(path.read_text(encoding="utf-8"))


def value_of(word: str) -> Any:
    """What FILE:PATH or MODULE:NAME names."""
    source, _, path = word.partition(":")
    try:
        found = import_module(source) if "." in source else stored(source)
        for name in re.findall(r"\[[^]]*\]|[^.[]+", path):
            found = _attribute(found, name) if "." in source and not isinstance(found, tuple) else _entry(found, name)
    except (AttributeError, ImportError, IndexError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise PageError(f"{word}: {type(error).__name__}: {error}") from error
    return found


def _attribute(owner: Any, name: str) -> Any:
    if name.endswith(")"):
        called, _, arguments = name.removesuffix(")").partition("(")
        return getattr(owner, called)(*map(int, filter(None, arguments.split(","))))
    for fields in (getattr(owner, "__dataclass_fields__", {}), getattr(owner, "model_fields", {})):
        if isinstance(owner, type) and name in fields:
            return fields[name].default
    return getattr(owner, name)


def _entry(found: Any, name: str) -> Any:
    if isinstance(found, dict) and name != "*":
        return {key.replace(" ", "_"): value for key, value in found.items()}[name]
    if name == "*":
        return [*found.values()] if isinstance(found, dict) else [each for part in found for each in part.values()]
    if re.fullmatch(r"-?\d+", name):
        return found[int(name)]
    if ":" in name:
        return found[slice(*(int(end) if end else None for end in name[1:-1].split(":")))]
    if name.startswith("["):
        wanted = dict(part.split("=", 1) for part in name[1:-1].split("&"))
        return next(each for each in found if wanted == {key: str(each[key]).replace(" ", "_") for key in wanted})
    return [_entry(each, name) for each in found]


def figure(expression: str) -> str:
    """The text of a figure."""
    *words, spec = expression.split()
    total: Any = None
    operator, folds = "", []
    try:
        for word in words:
            if word in _OPERATORS:
                operator = word
            elif word in _FOLDS:
                folds.append(_FOLDS[word])
            else:
                value = value_of(word) if ":" in word else float(word)
                for fold in reversed(folds):
                    value = fold(value)
                total = value if total is None else _OPERATORS[operator](total, value)
                folds = []
        return written(total, spec)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise PageError(f"{expression} is not a figure: {type(error).__name__}: {error}") from error


def written(value: Any, spec: str) -> str:
    """A value as the pages write it: a real minus, and a space before %."""
    return format(value, spec).replace("-", "−").replace("%", " %")


def renewed(name: str, text: str, tables: Mapping[str, Callable[[str], str]]) -> str:
    """A page with its marked figures and tables made anew."""
    if line := _BEGINS_LINE.search(text):
        raise PageError(f"{name}: no line may begin with a figure, which is HTML then: {text[line.start() :][:90]}")
    for pattern, kind in ((FIGURE, "figure"), (TABLE, "table")):
        if not len(pattern.findall(text)) == text.count(f"<!-- {kind}: ") == text.count(f"<!-- /{kind} -->"):
            raise PageError(f"{name}: a {kind} lacks its begin or its end")

    def table(mark: re.Match[str]) -> str:
        if mark[2] not in tables:
            raise PageError(f"there is no table {mark[2]}; there are {', '.join(sorted(tables))}")
        return f"{mark[1]}{tables[mark[2]](name)}{mark[4]}"

    try:
        return TABLE.sub(table, FIGURE.sub(lambda mark: f"{mark[1]}{figure(mark[2])}{mark[4]}", text))
    except PageError as error:
        raise PageError(f"{name}: {error}") from error
