"""The command `muri-lab experiment`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from muri.simulator.commands import read_traces
from muri_lab.sweep.command import carry_out, check_how_it_runs, options_of_runs


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("experiment")
@click.argument("trace_files", metavar="[TRACE]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--traces", "traces_folder", type=click.Path(path_type=Path, file_okay=False),
              help="The folder of the experiment's traces, where no TRACE is given.")  # fmt: skip
@options_of_runs
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def experiment(**given: Any) -> None:
    """Repeat a figure or table of the Muri paper, and set the published figures beside those of this simulator.

    EXPERIMENT is fig8 to fig14, table4, table5 or testbed, or a YAML file of your own, which names policies, cluster
    and settings.

    \b
    Examples:
      muri-lab experiment fig9 --traces traces --jobs 4 --out fig9
      muri-lab experiment my.yaml jobs.csv --json
    """
    from muri.simulator.metrics import document_of, summarize
    from muri_lab.experiments.experiment import find_traces, load_experiment, runs_of_experiment
    from muri_lab.experiments.page import Findings, markdown_page, write_experiment

    check_how_it_runs(given)
    described = load_experiment(given["experiment"])
    found = find_traces(described, given["traces_folder"], given["trace_files"])
    read = read_traces(tuple(found.files.values()), given["trace_format"], skip_bad_rows=given["skip_bad_rows"])
    traces = [replace(trace, name=name) for trace, name in zip(read, found.files, strict=True)]
    summaries = summarize(carry_out(given, runs_of_experiment(described, traces)))
    findings = Findings.of(described, summaries, found.missing)
    if given["out"] is not None:
        write_experiment(findings, summaries, given["out"])
    if given["as_json"]:
        document = {"experiment": given["experiment"], **findings.as_json()}
        click.echo(json.dumps({**document, **document_of(summaries)}, indent=1))
    else:
        click.echo(markdown_page(findings))
