"""The command `muri-lab papers-page`: writes out/papers.md from lab/papers/*.yaml and stored figures."""

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal

import click
import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator

from muri_lab.benchmarks.papers.frame import RESULTS, shown

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # papers name the sandbox, too, which only a checkout has
FOLDER = ROOT / "lab" / "papers"
PAGE = ROOT / "out" / "papers.md"
PAPERS = {
    "muri": "Muri (Zhao et al., SIGCOMM 2022)",
    "muri-report": "Report on Muri (in Chinese)",
    "synergy": "Synergy (Mohan et al., OSDI 2022)",
    "sjf-bsbf": "SJF-BSBF: wise resource sharing",
    "horus": "Horus (Yeung et al., TPDS 2021)",
}
INTRODUCTION = """\
# The papers, and what is here

Every mechanism, equation, algorithm, table and figure of the five source texts: where it lives in Muri, and what was
measured beside the published figure. A row without a place says why it is missing. The names lead to the code. Commands
run from a checkout; their output is kept in `lab/muri_lab/benchmarks/results/papers/`.

`muri-lab papers-page` makes this page from `lab/papers/*.yaml` and the stored figures; a test renders it, imports
every name and runs every experiment small.
"""


_NAME: Final = re.compile(r"\{(\w+)\}")  # a quoted figure of another benchmark, such as "{forty_runs}"


class Row(BaseModel):
    """One mechanism, equation, algorithm, table or figure."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    place: str  # Where it stands in the paper
    kind: Literal["mechanism", "equation", "algorithm", "table", "figure"]
    what: str  # its statement, in a line
    here: tuple[str, ...] = ()  # Dotted names of the code that does it
    command: str = ""  # What shows or repeats it
    result: str = ""  # Name of the experiment whose stored figures the page shows
    published: str = ""  # The published figure, where no result shows it
    measured: str = ""  # Ours, likewise
    difference: str = ""  # Why they differ
    open: str = ""  # Why it is not here, or not wholly

    @model_validator(mode="after")
    def _is_somewhere(self) -> "Row":
        if not (self.here or self.command or self.open):
            raise ValueError(f"{self.place}: say where it is (here, command) or why it is not (open)")
        return self


def read_rows(name: str) -> list[Row]:
    """The rows of a paper."""
    path = FOLDER / f"{name}.yaml"
    try:
        return TypeAdapter(list[Row]).validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (ValidationError, yaml.YAMLError) as error:
        sys.exit(f"{path.relative_to(ROOT)}: {error}")


def find(dotted: str) -> object:
    """Return the object of a dotted name."""
    names = dotted.split(".")
    for end in range(len(names), 0, -1):
        try:
            found: object = import_module(".".join(names[:end]))
        except ModuleNotFoundError:
            continue
        for name in names[end:]:
            found = _attribute(found, name)
        return found
    raise ImportError(f"no module {dotted}")


def _attribute(owner: object, name: str) -> object:
    # A dataclass's field without a default, with slots or not, is not an attribute of the class.
    fields = getattr(owner, "__annotations__", {}) | getattr(owner, "model_fields", {})
    return fields[name] if not hasattr(owner, name) and name in fields else getattr(owner, name)


def page() -> str:
    """The whole page."""
    rows_of = {name: read_rows(name) for name in PAPERS}
    parts = [INTRODUCTION, _summary(rows_of)]
    for name, title in PAPERS.items():
        rows = rows_of[name]
        parts.append(f"## {title}\n")
        parts.append("\n".join(_list_line(row) for row in rows) + "\n")
        parts += [_figures(row) for row in rows if row.result]
    return "\n".join(parts)


def _summary(rows_of: Mapping[str, list[Row]]) -> str:
    lines = ["| text | parts | not here, or not wholly | repeated beside published figures |", "|---|---:|---:|---:|"]
    for name, rows in rows_of.items():
        open_count, results = sum(bool(row.open) for row in rows), sum(bool(row.result) for row in rows)
        lines.append(f"| {PAPERS[name]} | {len(rows)} | {open_count} | {results} |")
    return "\n".join(lines) + "\n"


def _list_line(row: Row) -> str:
    sentences = [f"- **{row.place}** ({row.kind}). {_sentence(row.what)}"]
    if row.here:
        sentences.append(f"Here: {', '.join(map(_link, row.here))}.")
    if row.command:
        sentences.append(f"Command: `{row.command}`.")
    labeled = {"Published": row.published, "Measured": row.measured, "Difference": row.difference, "Open": row.open}
    sentences += [f"{label}: {_sentence(_with_figures(row, text))}" for label, text in labeled.items() if text]
    return _wrapped(" ".join(sentences), "  ")


def _with_figures(row: Row, text: str) -> str:
    try:
        return quote(text, quoted())
    except KeyError as error:
        sys.exit(f"{row.place}: lab/muri_lab/benchmarks/papers/quoted.py has no figure {error}")


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text if text.endswith((".", "?")) else f"{text}."


def _link(dotted: str) -> str:
    found, names = find(dotted), dotted.split(".")
    module = dotted if inspect.ismodule(found) else next(name for name in _prefixes(names) if _is_module(name))
    path = Path(str(import_module(module).__file__)).resolve().relative_to(ROOT)
    word = dotted.removeprefix(module).lstrip(".") or path.name
    return f"[`{word}`](../{path})"


def _prefixes(names: list[str]) -> list[str]:
    return [".".join(names[:end]) for end in range(len(names) - 1, 0, -1)]


def _is_module(name: str) -> bool:
    try:
        import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def _figures(row: Row) -> str:
    path = RESULTS / f"{row.result}.json"
    if not path.exists():
        sys.exit(
            f"{row.place}: there is no {path.relative_to(ROOT)}; run: python -m muri_lab.benchmarks.papers {row.result}"
        )
    result = json.loads(path.read_text(encoding="utf-8"))
    lines = [f"### {row.result}: {result['title']}", ""]
    lines += ["| case | figure | published | ours |", "|---|---|---:|---:|"]
    lines += [_figure_line(one) for one in result["rows"]]
    lines += ["", _wrapped(f"{_sentence(result['difference'])} Split: {_sentence(result['split'])}"), ""]
    if result["curves"]:
        lines += [f"![{result['title']}](../lab/muri_lab/benchmarks/results/papers/{row.result}.png)", ""]
    return "\n".join(lines)


def _figure_line(row: dict[str, Any]) -> str:
    published, ours = (shown(row[name], row["unit"]) for name in ("published", "ours"))
    return f"| {row['case']} | {row['figure']} | {published} | {ours} |"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
def papers_page() -> int:
    """Write out/papers.md: what each paper says, where Muri has it, and our figures beside its own.

    \b
    Examples:
      python -m muri_lab.benchmarks.papers muri-fig13     run an experiment again, and keep its figures
      muri-lab papers-page                                bring them into the page
    """
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    click.echo(PAGE)
    return 0


def quote(text: str, figures: dict[str, str]) -> str:
    """The text with figures in place of their names."""
    return _NAME.sub(lambda found: figures[found[1]], text)


@cache
def quoted() -> dict[str, str]:
    """All figures by name, as they stand in benchmarks/results."""
    return {**_interleaving(), **_threads(), **_scale(), **_fidelity()}


def _stored(name: str) -> Any:
    return json.loads((RESULTS.parent / f"{name}.json").read_text(encoding="utf-8"))


def _percent(share: float, how: str) -> str:
    return f"{share:{how}%}".replace("-", "−").replace("%", " %")


def _interleaving() -> dict[str, str]:
    stored, scale = _stored("interleaving"), _stored("scale")
    equal, (unequal,) = stored["equal"]["figures"]["set"], stored["unequal"]["figures"].values()
    ways = ("plain", "lockstep", "fair", "fair-processes", "auto-processes")
    hand_overs = {way: scale[f"hand-over-{way}"]["figures"]["p50_us"] for way in ("threads", "processes")}
    return {
        **{f"equal_{way.replace('-', '_')}": f"{equal[way]['total']:.2f}" for way in ways},
        **{f"unequal_{way.replace('-', '_')}": f"{unequal[way]['ratio']:.2f}" for way in ways},
        **{f"hand_over_{way}": f"{p50_us:.0f}" for way, p50_us in hand_overs.items()},
    }


def _threads() -> dict[str, str]:
    scripts = _stored("compatibility")["scripts"]
    return {"scripts": str(len(scripts)), "thread_scripts": str(sum(script["dangers"] == [] for script in scripts))}


def _scale() -> dict[str, str]:
    return {"decision_s": f"{_stored('scale')['decide-10k']['figures']['cpu_s']:.1f}"}


def _fidelity() -> dict[str, str]:
    forty, rows = _stored("forty")["muri"], _stored("fidelity")["rows"]
    found = {"forty_runs": str(forty["live_runs"]), "fidelity_workloads": str(len(rows))}
    for metric in ("average_jct_s", "makespan_s"):
        errors = [abs(row[f"{metric}_error"]) for row in rows]
        found[f"forty_{metric}"] = _percent(forty[f"{metric}_error"], "+.1")
        found[f"fidelity_{metric}"] = (
            f"{_percent(fmean(errors), '.1')} in the mean and {_percent(max(errors), '.1')} at worst"
        )
    return found
