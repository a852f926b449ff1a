"""Check that what is imported in a script's own process works on every Python that Muri supports there.

pyproject.toml has the one list of these files ([tool.ruff.per-file-target-version]). This asks whether the list holds
all that they import, also where a function imports it, and whether they use only what the oldest of these Pythons has.
Ruff finds later syntax, vermin later names; what both leave out is looked for here.
"""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import muri
from muri.pythons import OLDEST

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("muri.launcher.script.solo", "muri.launcher.shared_process.danger_watch")
ENTRIES = (*SCRIPTS, *sorted({"muri", *muri._LAZY.values()}))
"""First modules of a script's process: `muri run`, those it loads by name, and the names that `import muri` gives."""

_BUILTIN_TYPES = frozenset(
    {"bool", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple", "type"}
)
_LATE_METHODS = {"removeprefix", "removesuffix", "bit_count", "is_relative_to", "with_stem"}


def listed_files(root: Path) -> set[Path]:
    """The files that pyproject.toml promises to the oldest Python."""
    told = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    oldest = "py" + "".join(map(str, OLDEST))
    patterns = [
        pattern for pattern, target in told["tool"]["ruff"]["per-file-target-version"].items() if target == oldest
    ]
    return {path.relative_to(root) for pattern in patterns for each in expanded(pattern) for path in root.glob(each)}


def expanded(pattern: str) -> Iterator[str]:
    """A pattern's braces written out, which ruff understands and `glob` does not."""
    before, brace, rest = pattern.partition("{")
    if not brace:
        yield pattern
        return
    choices, _, after = rest.partition("}")
    for choice in choices.split(","):
        yield from expanded(before + choice + after)


def rooms(root: Path) -> Mapping[str, Path]:
    """The packages and where they lie."""
    told = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    return {name: Path(place) for name, place in told["tool"]["setuptools"]["package-dir"].items()}


def file_of(module: str, root: Path) -> Path | None:
    """The file of one of Muri's modules, None where it is not a module, such as a name in one."""
    places = rooms(root)
    room = max((name for name in places if f"{module}.".startswith(f"{name}.")), key=len, default=None)
    if room is None:
        return None
    inner = places[room].joinpath(*module[len(room) + 1 :].split("."))
    for path in (inner.with_suffix(".py"), inner / "__init__.py"):
        if (root / path).is_file():
            return path
    return None


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module, or name in a module, that a file imports when it is run rather than checked."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)
        yield from imported(node)


def loaded_files(entries: tuple[str, ...], root: Path) -> dict[Path, str]:
    """All files that the entries can come to import, each with the module that does."""
    found: dict[Path, str] = {}
    waiting = [(entry, "a script") for entry in entries]
    while waiting:
        module, importer = waiting.pop()
        path = file_of(module, root)
        if path is None or path in found:
            continue
        found[path] = importer
        package, _, _ = module.rpartition(".")
        tree = ast.parse((root / path).read_text(encoding="utf-8"))
        waiting += [(name, module) for name in (package, *imported(tree)) if name]
    return found


def late_uses(source: str) -> Iterator[tuple[int, str]]:
    """What neither ruff nor vermin finds: lines and what is wrong there."""
    tree = ast.parse(source)
    annotations = {id(inner) for node in ast.walk(tree) for note in _annotations(node) for inner in ast.walk(note)}
    abstract = {
        each.asname or each.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("collections", "collections.abc", "queue", "weakref")
        for each in node.names
    }
    for node in ast.walk(tree):
        if id(node) in annotations:
            continue
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and isinstance(node.ctx, ast.Load):
            if node.value.id in _BUILTIN_TYPES | abstract:
                yield node.lineno, f"{node.value.id}[…] where it is run; take typing's"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            if any(_is_type_or_dict(side) for side in (node.left, node.right)):
                yield node.lineno, "types or dictionaries joined by |"
        elif isinstance(node, ast.Attribute) and node.attr in _LATE_METHODS:
            yield node.lineno, f".{node.attr}()"


def _annotations(node: ast.AST) -> Iterator[ast.AST]:
    for name in ("annotation", "returns"):
        if isinstance(found := getattr(node, name, None), ast.AST):
            yield found


def _is_type_or_dict(node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _BUILTIN_TYPES
    return isinstance(node, ast.Dict | ast.DictComp | ast.Subscript) or (
        isinstance(node, ast.Constant) and node.value is None
    )


def faults(root: Path, entries: tuple[str, ...] = ENTRIES) -> list[str]:
    """Faults, a line each."""
    listed = listed_files(root)
    loaded = loaded_files(entries, root)
    found = [
        f"{path}: {importer} imports it in a script's process, but [tool.ruff.per-file-target-version] lacks it"
        for path, importer in sorted(loaded.items())
        if path not in listed
    ]
    for path in sorted(listed):
        found += [f"{path}:{line}: {what}" for line, what in late_uses((root / path).read_text(encoding="utf-8"))]
    target = ".".join(map(str, OLDEST))
    command = [
        sys.executable,
        "-c",
        "from vermin import main; main()",
        f"--target={target}-",
        "--violations",
        "--no-tips",
        *map(str, sorted(listed)),
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        found.append(done.stdout + done.stderr)
    return found


if __name__ == "__main__":
    wrong = faults(ROOT)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    sys.exit(bool(wrong))
