"""Print how many tests of each kind ran, from pytest's JUnit files; fail when one is missing or empty.

A test that failed and was tried again stands there once per try; those that then passed are named.
"""

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ELSE_THAN_PASSED = ("failure", "error", "skipped")


def line(name: str, path: Path) -> tuple[str, bool]:
    """Return the line for one file and whether every test in it passed, if not at the first try."""
    if not path.exists():
        return f"{name}: did not run", False
    suites = list(ElementTree.parse(path).getroot().iter("testsuite"))  # noqa: S314 (our own file)
    total, failures, errors, skipped = (
        sum(int(suite.get(what, 0)) for suite in suites) for what in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    text = f"{name}: {total - failed - skipped} passed, {failed} failed, {skipped} skipped"
    again = passed_later(suites)
    if again:
        text += f"; {len(again)} of them passed at a later try only: {', '.join(again)}"
    return text, total > 0 and failed == 0


def passed_later(suites: list[ElementTree.Element]) -> list[str]:
    """The tests that failed and then passed."""
    cases = [case for suite in suites for case in suite.iter("testcase")]
    times = Counter(_name(case) for case in cases)
    not_passed = {_name(case) for case in cases if any(case.find(word) is not None for word in ELSE_THAN_PASSED)}
    return sorted(name for name, count in times.items() if count > 1 and name not in not_passed)


def main() -> int:
    """Print one line per `NAME=FILE` argument."""
    good = True
    for argument in sys.argv[1:]:
        name, _, file = argument.partition("=")
        text, fine = line(name, Path(file))
        good = good and fine
        print(text)
    return 0 if good else 1


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


if __name__ == "__main__":
    sys.exit(main())
