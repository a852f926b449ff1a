"""The commands that pages name exist, have the options named, and still make the results that the pages show."""

import contextlib
import io
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from muri_lab.benchmarks.page_marks import FIGURE, RESULTS, stored
from muri_lab.benchmarks.pages import all_pages

ROOT = Path(__file__).resolve().parents[3]
COMMAND = re.compile(r"(?:python |`)(-m muri_lab.benchmarks[\w.]*|lab/muri_lab/benchmarks/[\w/]+\.py)([^`\n\\|#]*)")
TEXTS = [page.read_text() for page in all_pages()]
COMMANDS = sorted({(place, " ".join(words.split())) for text in TEXTS for place, words in COMMAND.findall(text)})
# Their command line is that of the module, or they have none.
NO_COMMANDS = {"-m muri_lab.benchmarks.pages", "lab/muri_lab/benchmarks/compatibility_data.py"}


def path_of(place: str) -> Path:
    """Return the file behind a script's path or `-m MODULE`."""
    if not place.startswith("-m"):
        return ROOT / place
    path = ROOT / "lab" / place.removeprefix("-m ").replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def run(path: Path, *words: str) -> str:
    """Run a script in this process, and return its output."""
    printed, before = io.StringIO(), sys.argv
    sys.argv = [str(path), *words]
    try:
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
            sys.exit(0)
    finally:
        sys.argv = before
    assert not ended.value.code, printed.getvalue()
    return printed.getvalue()


def test_the_benchmarks_that_pages_name_exist() -> None:
    assert len(COMMANDS) > 5
    assert not [f"python {place} {words}" for place, words in COMMANDS if not path_of(place).is_file()]


@pytest.mark.parametrize("place", sorted({place for place, _ in COMMANDS} - NO_COMMANDS))
def test_a_benchmark_has_the_options_that_pages_name(place: str) -> None:
    path = path_of(place)
    if '__name__ == "__main__"' not in path.read_text():
        return  # named as a place of code
    for words in {words for command, words in COMMANDS if command == place}:
        known = run(path, "--help")
        part = words.split(" ")[0]
        if part.isidentifier() and re.search(rf"^  {part} ", known, re.MULTILINE):
            known = run(path, part, "--help")
        named = {word.partition("=")[0] for word in words.split() if word.startswith("--")}
        assert not [word for word in named if word not in known], words


def test_every_result_that_a_page_shows_has_a_command() -> None:
    """A file of results is named by the script that writes it, so that it can be made anew."""
    shown = {word.partition(":")[0] for text in TEXTS for mark in FIGURE.findall(text) for word in mark[1].split()}
    files = {name for name in shown if "." not in name and (RESULTS / f"{name}.json").is_file()}
    code = (ROOT / "lab" / "muri_lab").rglob("*.py")
    sources = "".join(path.read_text() for path in code)
    assert len(files) > 5
    assert not [name for name in sorted(files) if not name.startswith("papers/") and f"{name}.json" not in sources]


@pytest.mark.parametrize("policy", ["fifo", "srsf", "antman", pytest.param("muri-s", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "limited"])
def test_the_simulator_still_gives_the_stored_comparison(
    policy: str, plain: bool, benchmark: Callable[[str], ModuleType]
) -> None:
    case = stored("compare_policies_plain" if plain else "compare_policies")["short-and-crowded"]["figures"][policy]
    found = benchmark("compare_policies").attempt("short-and-crowded", policy, 400, plain=plain)
    assert _without_times(found) == _without_times(case)


def _without_times(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if name not in {"wall_s", "decision_mean_s"}}


def test_a_row_of_the_large_cluster_still_runs() -> None:
    found = json.loads(run(RESULTS.parent / "scale.py", "--here", "decide-1k"))
    assert set(found) == set(stored("scale")["decide-1k"]["figures"])


def test_a_round_of_synergy_still_has_the_stored_throughput(benchmark: Callable[[str], ModuleType]) -> None:
    opt = benchmark("synergy_opt")
    request = opt.round_of((20, 70, 10), 2)
    kept = stored("synergy_opt")["20/70/10"]["figures"]["seed 2"]
    assert round(opt.throughput(request, opt.planned(request, opt.tune)[0]), 2) == kept["tune"]


def test_the_example_of_planning_runs() -> None:
    text = (ROOT / "docs" / "policies.md").read_text()
    example = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert example and "policy.plan(" in example[1]
    exec(example[1], {})  # its last line asserts the printed plan
