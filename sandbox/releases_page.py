"""docs/releases.md: what each release of Slurm was found to do. One that is not examined anew keeps its column."""

import datetime
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from sandbox.source import SOURCE_PREFIX
from sandbox.support import CHECKOUT, UsageError

PAGE: Final = CHECKOUT / "docs/releases.md"

TESTS: Final = "sandbox tests"
"""The one question that no probe answers; not asked of every release."""

_TRIED: Final = "tried on"


@dataclass(frozen=True)
class Answer:
    """A release's answer to a question.

    Attributes:
        works: Whether it can do what the question is about.
        note: What else is worth knowing, "" when nothing.
    """

    works: bool
    note: str = ""


@dataclass(frozen=True)
class Release:
    """One column of the page: a suite's Slurm, when it was tried, and the answers by the questions' text."""

    suite: str
    slurm_version: str
    tried: datetime.date
    answers: Mapping[str, Answer]

    @property
    def head(self) -> str:
        """Return the column's head, such as 26.05.5 (forky), and 25.11.7 for a Slurm from source."""
        version = self.suite.removeprefix(SOURCE_PREFIX)
        return f"{self.slurm_version} ({self.suite})" if version == self.suite else version

    @property
    def order(self) -> tuple[int, ...]:
        """Return what releases are sorted by."""
        return tuple(int(part) for part in re.findall(r"\d+", self.head))

    @property
    def series(self) -> tuple[bool, tuple[int, ...]]:
        """Return what only one column is about: a release of Slurm, by Debian or by its source."""
        return self.suite.startswith(SOURCE_PREFIX), self.order[:2]


#: Of tests, from the best to the worst.
OUTCOMES: Final = ("passed", "skipped", "failed", "error")


def outcomes(junit: str | bytes) -> dict[tuple[str, str], str]:
    """Return what became of each test of a report in JUnit's format, by its class and name."""
    found: dict[tuple[str, str], str] = {}
    words = {"skipped": "skipped", "failure": "failed", "error": "error"}
    for case in ElementTree.fromstring(junit).iter("testcase"):
        test = case.get("classname", ""), case.get("name", "")
        told = [found.get(test, "passed"), *(words[each.tag] for each in case if each.tag in words)]
        found[test] = max(told, key=OUTCOMES.index)  # a teardown that fails has a case of its own
    return found


def outcome_of_tests(junit: Path) -> Answer:
    """Return how the sandbox tests went, by pytest's report."""
    try:
        ended = outcomes(junit.read_bytes())
    except (OSError, ElementTree.ParseError) as err:
        raise UsageError(f"--tests {junit} is not a report that pytest's --junitxml wrote: {err}") from err
    failed = sorted(name for (_, name), outcome in ended.items() if outcome in {"failed", "error"})
    counted = Counter(ended.values())
    text = f"{counted['passed']} passed" + (f", {counted['skipped']} skipped" if counted["skipped"] else "")
    return Answer(not failed, text + (f", {len(failed)} failed: {', '.join(failed)}" if failed else ""))


def with_column(releases: Sequence[Release], new: Release) -> list[Release]:
    """Return the columns with a new one, in place of the one about the same release; an older run of tests is kept."""
    same = [release for release in releases if release.series == new.series]
    kept = {question: answer for release in same for question, answer in release.answers.items() if question == TESTS}
    column = Release(new.suite, new.slurm_version, new.tried, {**kept, **new.answers})
    return [*(release for release in releases if release not in same), column]


def page(releases: Sequence[Release], questions: Sequence[str], slurms_tests: str) -> str:
    """Return the page: these releases, newest first, the answers to these questions, and a report of Slurm's tests."""
    columns = sorted(releases, key=lambda release: release.order, reverse=True)
    notes: dict[str, int] = {}

    def cell(answer: Answer | None) -> str:
        if answer is None:
            return ""
        mark = "✓" if answer.works else "–"
        return f"{mark}[^{notes.setdefault(answer.note, len(notes) + 1)}]" if answer.note else mark

    rows = [["", *(release.head for release in columns)], [_TRIED, *(str(release.tried) for release in columns)]]
    rows += [[question, *(cell(release.answers.get(question)) for release in columns)] for question in questions]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * (len(columns) + 1) + "|")
    said = [f"[^{number}]: {note}" for note, number in notes.items()]
    return _TEXT.format(table="\n".join(lines), notes="\n".join(said), slurms_tests=slurms_tests)


def releases_on(text: str) -> list[Release]:
    """Return the columns of a page."""
    notes = dict(re.findall(r"^\[\^(\d+)\]: (.*)$", text, re.MULTILINE))
    table = text.partition(_SLURMS_TESTS)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return list(_columns(rows, notes))


def _columns(rows: Sequence[Sequence[str]], notes: Mapping[str, str]) -> Iterator[Release]:
    for place, head in enumerate(rows[0][1:], start=1):
        version, _, suite = head.rstrip(")").partition(" (")
        cells = {row[0]: row[place] for row in rows[3:] if row[place]}
        answers = {
            question: Answer(cell[0] == "✓", notes[number[1]] if (number := re.search(r"\[\^(\d+)\]", cell)) else "")
            for question, cell in cells.items()
        }
        tried = datetime.date.fromisoformat(rows[2][place])
        yield Release(suite or f"{SOURCE_PREFIX}{version}", version, tried, answers)


_SLURMS_TESTS: Final = "## Slurm's own tests"

_TEXT: Final = f"""\
# Releases of Slurm

What Muri depends on, tried on releases of Slurm: on clusters like a site's, with accounting, munge or auth/slurm, typed
GPUs and a login host. A column with a name in parentheses is that Debian release's Slurm; the others were built from
Slurm's own source. `bin/muri-sandbox matrix` writes this page; do not edit it.

✓ works, – does not. The sandbox tests are those of [testing](testing.md); where only some ran, they are those from end
to end: groups, members in their own jobs, sites, and both ways to Slurm. Where the cell is empty they have not run as a
whole; `make test-all` has tests on all of Debian's releases.

{{table}}

{{notes}}

A job whose GPU cannot be taken away while it waits always runs alone. The controller tries that on the cluster at hand,
and `muri doctor` shows the result; this page is not a substitute for that.

To add a release, from its source tree or from a tag of Slurm's repository, with all tests (one to two hours):

    make test-all SLURM=DIR RELEASE=slurm-25-11-7-1

{_SLURMS_TESTS}

Slurm's repository holds tests of its commands. `bin/muri-sandbox guest-tests` runs those that concern Muri three times:
without Muri; with its plugins and its controller at work (a cycle every 5 s), no job marked; and with every batch job
marked (SBATCH_MURI=1).

{{slurms_tests}}
"""
