"""Repeat a figure or table of a paper: python -m muri_lab.benchmarks.papers NAME."""

import json
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from muri.errors import MuriError
from muri_lab.benchmarks.papers.frame import ROOT, Experiment, MissingDataError, Outcome, document_of, keep, shown


def experiments() -> dict[str, Experiment]:
    """All experiments, by name: those of every module here that has some."""
    modules = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py") if path.stem != "frame")
    found = [
        experiment
        for module in modules
        for experiment in getattr(import_module(f"muri_lab.benchmarks.papers.{module}"), "EXPERIMENTS", ())
    ]
    by_name = {experiment.name: experiment for experiment in found}
    assert len(by_name) == len(found), "two experiments have one name"
    return by_name


def print_outcome(experiment: Experiment, outcome: Outcome) -> None:
    """The figures as a table of at most 80 columns, then why they differ."""
    table = Table(title=f"{experiment.place}: {experiment.title}", title_justify="left", show_edge=False)
    for heading in ("case", "figure"):
        table.add_column(heading, overflow="fold")
    for heading in ("published", "ours"):
        table.add_column(heading, justify="right", overflow="fold")
    for row in outcome.rows:
        table.add_row(row.case, row.figure, shown(row.published, row.unit), shown(row.ours, row.unit))
    console = Console(width=80, highlight=False, markup=False)
    console.print(table)
    console.print(f"\n{outcome.difference}\nSplit: {experiment.split}")


def _list(of_name: Mapping[str, Experiment]) -> None:
    widest = max(len(name) for name in of_name)
    for experiment in of_name.values():
        click.echo(f"{experiment.name:<{widest}}  {experiment.place}: {experiment.title}")


def _run(experiment: Experiment, quick: bool, traces: tuple[Path, ...]) -> Outcome:
    if not traces:
        return experiment.run(quick)
    if quick or experiment.run_on is None:
        raise click.UsageError(f"--trace is not an option of {experiment.name}{' --quick' * quick}")
    return experiment.run_on(traces)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, metavar="NAME…")
@click.option("--quick", is_flag=True, help="A small part that takes seconds; nothing is kept.")
@click.option(
    "--trace",
    "traces",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run on this trace instead of those that the published figures are of, and keep nothing; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--write/--no-write", "stored", default=True, help="Keep the figures in benchmarks/results/papers.")
def main(names: tuple[str, ...], quick: bool, traces: tuple[Path, ...], as_json: bool, stored: bool) -> None:
    """Repeat figures and tables of the papers, and print ours beside the published figures.

    Without NAME the experiments are listed. After a run, `muri-lab papers-page` writes out/papers.md anew. An
    experiment that lacks a trace or table of the published figures says which, keeps nothing and exits with 1.

    \b
    Examples:
      python -m muri_lab.benchmarks.papers
      python -m muri_lab.benchmarks.papers muri-fig13
      python -m muri_lab.benchmarks.papers synergy-fig7 --quick --json
      python -m muri_lab.benchmarks.papers muri-table4 --trace mine.csv
    """
    of_name = experiments()
    if not names:
        _list(of_name)
        return
    unknown = [name for name in names if name not in of_name]
    if unknown:
        raise click.UsageError(f"no experiment {', '.join(unknown)}; there are: {', '.join(of_name)}")
    for name in names:
        experiment, start_s = of_name[name], time.process_time()
        try:
            outcome = _run(experiment, quick, traces)
        except (MissingDataError, MuriError) as error:
            raise click.ClickException(f"{name}: {error}; nothing is kept") from error
        click.echo(f"{name}: {time.process_time() - start_s:.1f} s of CPU", err=True)
        if as_json:
            click.echo(json.dumps(document_of(experiment, outcome), indent=1, ensure_ascii=False))
        else:
            print_outcome(experiment, outcome)
        if stored and not quick and not traces:
            click.echo(f"kept in {keep(experiment, outcome).relative_to(ROOT)}", err=True)


if __name__ == "__main__":
    sys.exit(main())
