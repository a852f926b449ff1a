"""Write the marked figures and tables of README.md and docs/*.md from stored results and from the code.

`python -m muri_lab.benchmarks.pages --check` prints differences and exits with 1 if there are any.
"""

import difflib
import sys
from pathlib import Path

from muri_lab.benchmarks.page_marks import ROOT, PageError, renewed
from muri_lab.benchmarks.page_tables import TABLES


def all_pages(root: Path = ROOT) -> list[Path]:
    """The pages that may hold marks."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def main(root: Path = ROOT) -> int:
    """Write the pages, or with --check print how they differ; the exit status."""
    only_checks, failed = sys.argv[1:] == ["--check"], False
    for page in all_pages(root):
        name, old = str(page.relative_to(root)), page.read_text(encoding="utf-8")
        try:
            new = renewed(name, old, TABLES)
        except PageError as error:
            failed = True
            print(f"pages: {error}", file=sys.stderr)
            continue
        if only_checks:
            failed |= new != old
            differing = difflib.unified_diff(old.splitlines(), new.splitlines(), name, "as it should be", "", "", 0)
            sys.stdout.writelines(f"{line.rstrip()}\n" for line in differing)
        elif new != old:
            page.write_text(new, encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
