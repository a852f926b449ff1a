"""Forty jobs of two users on two nodes, nothing known of any model: plain Slurm, Muri, and what the twin says of both.

    python -m muri_lab.benchmarks.forty live plain --out lab/muri_lab/benchmarks/results/fidelity    # four minutes
    python -m muri_lab.benchmarks.forty live muri --out lab/muri_lab/benchmarks/results/fidelity     # three minutes
    python -m muri_lab.benchmarks.forty compare lab/muri_lab/benchmarks/results/fidelity

Both get the same scripts, in the same order, at the same times. Plain Slurm gets them without `--muri`, and no
controller runs. Muri starts cold: its store is empty, models are measured while they train, and users do not say how
long their jobs take. Of a side that ran live more than once, means are compared. The twins of Muri are told how slow
the machine was (`slowness_of`), since other programs may have run on it.
"""

import json
import os
from pathlib import Path
from typing import Any, Final

import click

from muri_lab.benchmarks.bars import describe_machine
from muri_lab.benchmarks.fidelity import Comparison, predict, slowness_of
from muri_lab.benchmarks.fidelity_live import config_of, dump, load, run_live
from muri_lab.benchmarks.fidelity_workloads import FORTY

RESULT: Final = Path(__file__).parent / "results" / "forty.json"
SIDES: Final = ("plain", "muri")
ASKED_FACTOR: Final = 1.6
ASKED_ERROR: Final = 0.05


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Compare Muri with plain Slurm, live and in the twin."""


@main.command()
@click.argument("side", type=click.Choice(SIDES))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--number", type=click.IntRange(1, 9), default=1, show_default=True,
              help="Which run of this side it is; those of other numbers are kept.")  # fmt: skip
def live(side: str, out: Path, number: int) -> None:
    """Run one side on a sandbox; leave the machine alone meanwhile."""
    out.mkdir(parents=True, exist_ok=True)
    name, begun = f"forty-{side}.{number}", os.getloadavg()
    run = run_live(FORTY, out / f"{name}.log", with_muri=side == "muri")
    about = {"machine": describe_machine(), "load_before": begun, "load_after": os.getloadavg()}
    (out / f"{name}.json").write_text(json.dumps({**dump(run), **about}) + "\n")
    click.echo(f"{name}: average JCT {run.average_jct_s:.1f} s, makespan {run.makespan_s:.1f} s")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--write/--no-write", "stored", default=True, help=f"Keep it in benchmarks/results/{RESULT.name}.")
def compare(folder: Path, stored: bool) -> None:
    """Run in the twin what ran live, and print both."""
    sides = {side: compared(side, folder) for side in SIDES}
    plain, muri = (comparison for comparison, _ in sides.values())
    factors = {
        "live": round(plain.measured("average_jct_s")[0] / muri.measured("average_jct_s")[0], 3),
        "twin": round(plain.predicted("average_jct_s")[0] / muri.predicted("average_jct_s")[0], 3),
    }
    for side, (comparison, _) in sides.items():
        for figure, title in (("average_jct_s", "average JCT"), ("makespan_s", "makespan")):
            (mine, *_), (twin, least, most) = comparison.measured(figure), comparison.predicted(figure)
            click.echo(f"{side:6} {title:12} live {mine:6.1f} s   twins {twin:6.1f} s ({least:.1f}–{most:.1f})   "
                       f"{comparison.error(figure):+.1%}")  # fmt: skip
    error = abs(muri.error("average_jct_s"))
    click.echo(f"factor: live {factors['live']:.2f} (asked {ASKED_FACTOR}), twins {factors['twin']:.2f}; error of the "
               f"prediction of Muri's average JCT {error:.1%} (asked {ASKED_ERROR:.0%})")  # fmt: skip
    if stored:
        rows = {side: {**comparison.row(), "lives": abouts} for side, (comparison, abouts) in sides.items()}
        found = {"machine": describe_machine(), "config": config_of(FORTY), "factor": factors, **rows}
        RESULT.write_text(json.dumps(found, indent=1) + "\n")


def compared(side: str, folder: Path) -> tuple[Comparison, list[Any]]:
    """A side live and in twins, and under which circumstances each live run was made."""
    told = [json.loads(path.read_text()) for path in sorted(folder.glob(f"forty-{side}.*.json"))]
    if not told:
        raise click.UsageError(f"{folder} holds no live run of {side}; make one with `live {side}`")
    lives = tuple(map(load, told))
    twins = tuple(
        twin for run in lives for twin in predict(FORTY, run, with_muri=side == "muri", slowness=slowness_of(run))
    )
    about = [
        {
            "average_jct_s": round(run.average_jct_s, 2),
            "slowness": round(slowness_of(run), 2),
            **{name: values[name] for name in ("machine", "load_before", "load_after")},
        }
        for run, values in zip(lives, told, strict=True)
    ]
    return Comparison(f"forty-{side}", lives, twins), about


if __name__ == "__main__":
    main()
