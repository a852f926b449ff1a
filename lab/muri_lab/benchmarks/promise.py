"""Promised speeds measured: a member that was promised 0.8 beside three that want the GPU all of the time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from muri_lab.benchmarks.bars import Bar, finish, tell
from muri_lab.benchmarks.interleaving_synthetic import PIECE_S, ProfileSet, run
from muri_lab.benchmarks.runtime_process import BenchmarkError

RESULT = Path(__file__).parent / "results" / "promise.json"

PROMISED = 0.8
LEAST = 0.78
MINUTE_S = 60.0
WARMUP_S = 10.0

OWN_STAGES_S = (0.02, 0.02, 0.05, 0.01)
"""The promised member: iterations of 100 ms, half of them on the GPU."""

GREEDY_STAGES_S = (0.005, 0.0, 0.5, 0.0)
"""Each of its partners: half a second on the GPU, and again as soon as five milliseconds of loading are over."""

PARTNERS = 3
WHOLE_S = 3600.0

ISOLATIONS = {"threads": "fair", "processes": "fair-processes"}
"""What the members are, and the way of running them so."""

CASES = {"whole stages": WHOLE_S, "yield points": PIECE_S}
"""How long the partners' stages hold the GPU at a time: to their end, or to the next yield point."""


def members(piece_s: float, promised: float) -> ProfileSet:
    """The promised member and its greedy partners.

    Args:
        piece_s: Seconds from one yield point of the partners to the next.
        promised: The promise; 0: none.
    """
    return ProfileSet(
        "one promised, three greedy",
        (OWN_STAGES_S, *[GREEDY_STAGES_S] * PARTNERS),
        MINUTE_S,
        WARMUP_S,
        (PIECE_S, *[piece_s] * PARTNERS),
        (promised, *[0.0] * PARTNERS),
    )


def measure(case: str) -> dict[str, Any]:
    """Speeds of the members, with the promise and without it, as threads and as processes."""
    figures: dict[str, Any] = {}
    for isolation, way in ISOLATIONS.items():
        for name, promised in (("no promise", 0.0), ("promised", PROMISED)):
            tell(f"{case}: {isolation}, {name}")
            # Nobody prefetches: the promised member waits for each of its stages.
            speeds = run(members(CASES[case], promised), way, prefetch=0)
            own, *others = (round(speed, 3) for speed in speeds)
            figures.setdefault(isolation, {})[name] = {
                "member": own, "partners": others, "total": round(sum(speeds), 3),
            }  # fmt: skip
        with_it, without = (figures[isolation][name]["total"] for name in ("promised", "no promise"))
        figures[isolation]["total_with_over_without"] = round(with_it / without, 3)
    return figures


def bars(cases: Mapping[str, dict[str, Any]]) -> list[Bar]:
    """The promise is kept."""
    found = []
    for case, figures in cases.items():
        for isolation in ISOLATIONS:
            speed = figures[isolation]["promised"]["member"]
            found.append(Bar(case, f"{isolation}, promised {PROMISED}", speed, f"≥ {LEAST}", speed >= LEAST))
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--case", "chosen", multiple=True, type=click.Choice(list(CASES)), help="Only this one; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print what was measured as JSON.")
@click.option("--write/--no-write", "stored", default=True, help="Keep it in benchmarks/results/promise.json.")
def main(chosen: tuple[str, ...], as_json: bool, stored: bool) -> None:
    """Measure whether promised speeds are kept, in eleven minutes; exit with 1 if one is not.

    \b
    Examples:
      python -m muri_lab.benchmarks.promise
      python -m muri_lab.benchmarks.promise --case "whole stages" --json
    """
    try:
        cases = {case: measure(case) for case in chosen or CASES}
    except BenchmarkError as error:
        raise click.ClickException(str(error)) from error
    finish(RESULT, cases, bars(cases), stored=stored, as_json=as_json)


if __name__ == "__main__":
    main()
