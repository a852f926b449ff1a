"""The command of a benchmark that puts our figures beside published ones: each line as it comes, or one document."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from muri.errors import MuriError
from muri_lab.benchmarks.bars import describe_machine, peak_rss_mib

Comparisons = Callable[[Path, Path], Iterable[dict[str, Any]]]
"""Gives one line for each comparison, from our input and the CSV of published results."""


def compare_with_published(
    text: str | None, option: str, help_: str, comparisons: Comparisons, line: Callable[[Mapping[str, Any]], str]
) -> int:
    """Read the command line, print all comparisons, and return the exit code: 0, or 1 after a printed error."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(option, dest="input", metavar="PATH", type=Path, required=True, help=help_)
    parser.add_argument("--published", type=Path, required=True, help="CSV of published results")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    found = []
    try:
        for comparison in comparisons(arguments.input, arguments.published):
            found.append(comparison)
            if not arguments.json:
                print(line(comparison))
    except (MuriError, OSError, KeyError, subprocess.CalledProcessError) as error:
        print(f"{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({"machine": describe_machine(), "peak_rss_mib": peak_rss_mib(), "runs": found}, indent=2))
    return 0
