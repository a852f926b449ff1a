"""Print how many tests of each kind ran, from pytest's JUnit files; fail when one is missing, empty or has failures."""

import sys
from pathlib import Path
from xml.etree import ElementTree


def line(name: str, path: Path) -> tuple[str, bool]:
    """Return the line for one file and whether every test in it passed or was skipped."""
    if not path.exists():
        return f"{name}: did not run", False
    suites = list(ElementTree.parse(path).getroot().iter("testsuite"))  # noqa: S314 (our own file)
    total, failures, errors, skipped = (
        sum(int(suite.get(what, 0)) for suite in suites) for what in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    return f"{name}: {total - failed - skipped} passed, {failed} failed, {skipped} skipped", total > 0 and failed == 0


def main() -> int:
    """Print one line per `NAME=FILE` argument."""
    good = True
    for argument in sys.argv[1:]:
        name, _, file = argument.partition("=")
        text, fine = line(name, Path(file))
        good = good and fine
        print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
