"""Write the keys of `sbatch --muri` from slurm_plugin/submit_option.yaml into everything that reads or explains them.

Each output keeps its hand-written text; only the parts between the two markers are generated. With `--check` nothing is
written: the differences are printed and the status is 1.
"""

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, TypeAdapter, ValidationError

ROOT = Path(__file__).resolve().parents[1]
TABLE = "slurm_plugin/submit_option.yaml"
BEGIN = f"generated from {TABLE}: "
END = "end of the generated part"
Number = Annotated[int, Field(ge=1, lt=10**12)]  # C reads at most twelve digits


class _Key(BaseModel):
    """What all keys have; submit_option.yaml explains each field."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: Annotated[str, Field(pattern=r"^[a-z]+(-[a-z]+)*$")]
    help: str
    remark: str = ""

    @property
    def attribute(self) -> str:
        # The field of Python's SubmitRequest.
        return self.name.replace("-", "_")

    @property
    def line(self) -> str:
        # What explains the key on a terminal.
        return self.help

    @property
    def sentence(self) -> str:
        # The field's docstring.
        return f"{self.help[0].upper()}{self.help[1:]}."


class _Name(_Key):
    """A name of limited length."""

    type: Literal["name"]
    longest: PositiveInt
    form: str
    example: str
    default: str
    python_type: ClassVar = "str"

    @property
    def limits(self) -> dict[str, int]:
        return {"max": self.longest}

    @property
    def longest_value(self) -> int:
        return self.longest

    @property
    def reader(self) -> str:
        return f"_name({self.longest})"

    @property
    def description(self) -> str:
        return f"a name: a letter or digit, then letters, digits and `. _ + / -`, {self.longest} at most"


class _Numeric(_Key):
    """A number that the tag holds in decimal digits."""

    min: Number
    max: Number
    form: str

    @property
    def limits(self) -> dict[str, int]:
        return {"min": self.min, "max": self.max}

    @property
    def longest_value(self) -> int:
        return len(str(self.max))

    @property
    def reader(self) -> str:
        return f"_number({self.min}, {self.max})"


class _Count(_Numeric):
    """A whole number within limits."""

    type: Literal["count"]
    example: Number
    default: int
    python_type: ClassVar = "int"

    @property
    def description(self) -> str:
        return f"a whole number from {self.min} to {self.max}"


class _Time(_Numeric):
    """A time above zero; the tag holds seconds."""

    type: Literal["time"]
    min: Number = 1
    max: Number = Field(alias="max_s")
    example: str
    default: int | None
    python_type: ClassVar = "int | None"
    description: ClassVar = "a time"

    @property
    def attribute(self) -> str:
        return f"{super().attribute}_s"

    @property
    def line(self) -> str:
        return f"{self.help}: minutes, HH:MM:SS, 90m, 2h"

    @property
    def sentence(self) -> str:
        return f"{super().sentence.removesuffix('.')}, in seconds."


class _Share(_Key):
    """A part of 1 in thousandths; the tag holds it without zeros at the end."""

    type: Literal["share"]
    form: str
    example: Annotated[str, Field(pattern=r"^0\.[0-9]{0,2}[1-9]$")]
    default: Annotated[float, Field(ge=0, lt=1)]
    python_type: ClassVar = "float"
    limits: ClassVar[dict[str, int]] = {}
    longest_value: ClassVar = len("0.123")
    reader: ClassVar = "_share"
    description: ClassVar = "a number from 0 to 0.999, with at most three digits after the point"


class _Flag(_Key):
    """Yes or no; the tag holds only yes, as 1."""

    type: Literal["flag"]
    form: ClassVar = ""
    example: ClassVar = ""
    default: ClassVar = False
    python_type: ClassVar = "bool"
    limits: ClassVar[dict[str, int]] = {}
    longest_value: ClassVar = 1
    reader: ClassVar = "_flag"
    description: ClassVar = "none, or 1/yes, 0/no"


Key = _Name | _Count | _Time | _Share | _Flag


def read_table(path: Path) -> tuple[Key, ...]:
    """Return the keys of a table in order.

    Raises:
        ValueError: A key has a field too many or too few, or two have the same name.
    """
    table = TypeAdapter(tuple[Annotated[Key, Field(discriminator="type")], ...])
    keys = table.validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
    names = [key.name for key in keys]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: two keys have the same name")
    return keys


def usage(key: Key) -> str:
    """Return a key as the help shows it, such as `model=NAME`."""
    return f"{key.name}={key.form}" if key.form else key.name


def canonical_length(keys: Sequence[Key]) -> int:
    """Return the length of the longest canonical text: every key with its longest value."""
    return sum(len(key.name) + len("=") + key.longest_value for key in keys) + len(keys) - 1


def _c_text(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def c_limits(keys: Sequence[Key]) -> list[str]:
    """Return the sizes and the help that the C files share."""
    longest_name = max((key.longest for key in keys if isinstance(key, _Name)), default=0)
    parts = [f"{usage(key)} ({key.line})" for key in keys]
    pieces = [_c_text(part + (", " if key is not keys[-1] else "")) for key, part in zip(keys, parts, strict=True)]
    return [
        "enum {",
        f"\tMURI_KEY_COUNT = {len(keys)},",
        f"\tMURI_NAME_MAX = {longest_name},\t/* characters in a name */",
        f"\tMURI_CANONICAL_SIZE = {canonical_length(keys) + 1},\t/* longest canonical text, with its NUL */",
        "};",
        "",
        "#define MURI_KEYS_HELP \\",
        *(f"\t{piece} \\" for piece in pieces[:-1]),
        f"\t{pieces[-1]}",
    ]


def c_keys(keys: Sequence[Key]) -> list[str]:
    """Return the rows of C's key table."""
    lines = []
    for key in keys:
        example = f"{key.name}={key.example}" if key.example else key.name
        fields = {
            "name": _c_text(key.name),
            "form": _c_text(usage(key)),
            "example": _c_text(example),
            "help": _c_text(key.line),
            "type": f"MURI_{key.type.upper()}",
            **{name: str(value) for name, value in key.limits.items()},
        }
        lines += ["\t{", *(f"\t\t.{name} = {value}," for name, value in fields.items()), "\t},"]
    return lines


def lua_keys(keys: Sequence[Key]) -> list[str]:
    """Return Lua's key table."""
    rows = []
    for key in keys:
        fields = [f'name = "{key.name}"', f'type = "{key.type}"', *(f"{name} = {n}" for name, n in key.limits.items())]
        rows.append(f"  {{ {', '.join(fields)} }},")
    return [f"local CANONICAL_LONGEST = {canonical_length(keys)}", "local KEYS = {", *rows, "}"]


def python_fields(keys: Sequence[Key]) -> list[str]:
    """Return the fields of Python's SubmitRequest."""
    lines = []
    for key in keys:
        default = _c_text(key.default) if isinstance(key.default, str) else repr(key.default)
        lines += [f"    {key.attribute}: {key.python_type} = {default}", f'    """{key.sentence}"""']
    return lines


def python_readers(keys: Sequence[Key]) -> list[str]:
    """Return which field each key fills, and how its value is read."""
    rows = [f'    "{key.name}": ("{key.attribute}", {key.reader}),' for key in keys]
    return ["_READERS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {", *rows, "}"]


def page_keys(keys: Sequence[Key]) -> list[str]:
    """Return the table of the documentation page."""
    rows = [
        f"| `{usage(key)}` | {key.description} | {key.help}{f'; {key.remark}' if key.remark else ''} |" for key in keys
    ]
    return ["", "| key | value | meaning |", "|---|---|---|", *rows, ""]


def page_refusal(keys: Sequence[Key]) -> list[str]:
    """Return the documentation page's example of a refused option."""
    return [
        "",
        "    $ sbatch --muri=modle=resnet18 --gres=gpu:1 train.sh",
        '    sbatch: error: muri: --muri=modle=resnet18: unknown key "modle"; did you mean "model"?',
        "    muri: valid keys of --muri=key=value,key=value are:",
        *(f"    muri:   {usage(key):14} {key.line}" for key in keys),
        "    sbatch: error: Invalid --muri argument: modle=resnet18",
        "",
    ]


OUTPUTS = {
    "slurm_plugin/spank/keys.h": {"limits": c_limits},
    "slurm_plugin/spank/keys.c": {"keys": c_keys},
    "slurm_plugin/job_submit/muri.lua": {"keys": lua_keys},
    "slurm_plugin/records/submit_option.py": {"fields": python_fields, "readers": python_readers},
    "docs/sbatch-option.md": {"keys": page_keys, "refusal": page_refusal},
}


def replaced(text: str, part: str, lines: Sequence[str]) -> str:
    """Return a file's text with the lines between the markers of one part replaced.

    Raises:
        ValueError: The part has no markers.
    """
    present = text.splitlines()
    begin = next((index for index, line in enumerate(present) if f"{BEGIN}{part} " in f"{line} "), None)
    if begin is None:
        raise ValueError(f"no line has the marker `{BEGIN}{part}`")
    end = next((index for index in range(begin, len(present)) if END in present[index]), None)
    if end is None:
        raise ValueError(f"no line after `{BEGIN}{part}` has the marker `{END}`")
    return "\n".join([*present[: begin + 1], *lines, *present[end:], ""])


def stale_outputs(keys: Sequence[Key]) -> dict[Path, str]:
    """Return the files that differ from the table, each with the text it should have."""
    stale = {}
    for name, parts in OUTPUTS.items():
        path = ROOT / name
        before = after = path.read_text(encoding="utf-8")
        for part, render in parts.items():
            try:
                after = replaced(after, part, render(keys))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        if after != before:
            stale[path] = after
    return stale


def main() -> int:
    """Write the outputs, or with `--check` compare them."""
    try:
        stale = stale_outputs(read_table(ROOT / TABLE))
    except (ValueError, ValidationError, yaml.YAMLError, OSError) as error:
        print(f"{TABLE}: {error}", file=sys.stderr)
        return 1
    if "--check" not in sys.argv[1:]:
        for path, text in stale.items():
            path.write_text(text, encoding="utf-8")
        return 0
    for path, text in stale.items():
        name = str(path.relative_to(ROOT))
        before = path.read_text(encoding="utf-8").splitlines(keepends=True)
        sys.stdout.writelines(difflib.unified_diff(before, text.splitlines(keepends=True), name, f"{name} (generated)"))
    if stale:
        print(f"out of step with {TABLE}; run `.venv/bin/python scripts/generate_option_grammar.py`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
