"""The command `muri-lab`: a table of sub-commands, each imported only when it is called."""

import sys
from typing import Final

import click

from muri import __version__
from muri.cli import site_state_dir
from muri.commands import LazyCommand, LazyGroup, run_command

COMMANDS: Final = {
    "sweep": LazyCommand("muri_lab.sweep.command:sweep", "Simulate policies on traces with all options; report."),
    "experiment": LazyCommand("muri_lab.experiments.command:experiment", "Repeat a figure or table of the Muri paper."),
    "predict": LazyCommand("muri_lab.prediction.command:predict_command", "Estimate a profile that was not measured."),
    "pair": LazyCommand("muri_lab.interference.command:pair_command", "Measure how two scripts slow each other down."),
    "fit": LazyCommand(
        "muri_lab.interference.command:fit_command", "Fit a model's times to batch size and gradient size."
    ),
    "slowdown": LazyCommand(
        "muri_lab.interference.command:slowdown_command",
        "Fit how use slows jobs down on a GPU type, from measured pairs.",
    ),
    "papers-page": LazyCommand(
        "muri_lab.papers_page:papers_page", "Write out/papers.md: each paper's claims, our code and figures."
    ),
    "fault-runs": LazyCommand(
        "muri_lab.twin.fault_runs:main", "Try the real controller on a virtual Slurm with faults, in virtual time."
    ),
}


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "obj": site_state_dir},
    epilog="The lab's policies and simulation models need no command of their own: once it is installed, `muri "
    "policies` lists them, and `muri simulate --policy NAME --model NAME` takes them.",
)
@click.version_option(__version__, prog_name="muri-lab")
def cli() -> None:
    """Explore, compare and prove: experiments of papers, sweeps, reports, fault stories, benchmarks."""


def main() -> None:
    """Entry point of the console script `muri-lab`."""
    sys.exit(run_command(cli))
