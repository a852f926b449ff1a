"""The command `muri-lab sweep`."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from muri.errors import UsageError
from muri.simulator.commands import AMOUNT, checked_options, cluster_of, read_traces, simulation_options
from muri.simulator.model import Outage

if TYPE_CHECKING:
    from muri.policies.traits import PairSpeed
    from muri.simulator.metrics import Outcome
    from muri.simulator.model import Run, Settings, Trace

_FOLDER: Final = click.Path(path_type=Path, file_okay=False)
_SETTINGS: Final = (
    "model", "interval_s", "restart_s", "profile_noise", "profiling_s", "outages", "slowdown", "any_user", "check",
)  # fmt: skip
_OUTAGE: Final = re.compile(r"(\d+):(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)(:drain)?", re.ASCII)
_RANGE: Final = re.compile(r"(\d+):(\d+)", re.ASCII)


def seeds(text: str) -> tuple[int, ...]:
    """Whole numbers ≥ 0 with commas between them, each once."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise click.BadParameter(f"{text!r} must be whole numbers ≥ 0, for example 0,1,2")
    found = tuple(int(word) for word in words)
    if len(set(found)) < len(found):
        raise click.BadParameter(f"{text!r} gives a seed more than once")
    return found


def job_range(text: str) -> tuple[int, int]:
    """FIRST:LAST, indices of jobs in the trace; LAST is excluded."""
    match = _RANGE.fullmatch(text)
    if not match or int(match[1]) >= int(match[2]):
        raise click.BadParameter(f"{text!r} must be FIRST:LAST, job indices with FIRST < LAST, like 100:400")
    return int(match[1]), int(match[2])


def outage(text: str) -> Outage:
    """NODE:START:END[:drain], a node's index and seconds since the trace's start."""
    match = _OUTAGE.fullmatch(text)
    if not match or float(match[2]) >= float(match[3]):
        raise click.BadParameter(
            f"{text!r} must be NODE:START:END or NODE:START:END:drain, with the node's index from 0 and START < END in "
            "seconds, like 3:3600:7200"
        )
    return Outage(int(match[1]), float(match[2]), float(match[3]), drain=match[4] is not None)


def options_of_runs(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how traces are read and runs are carried out."""
    for decorate in reversed((
        click.option("--format", "trace_format", metavar="FORMAT", help="Format of the traces; guessed when left out."),
        click.option("--skip-bad-rows", is_flag=True, help="Leave bad rows out, and count them."),
        click.option("--jobs", metavar="N", type=click.IntRange(min=1),
                     help="Simulations that run at the same time.  [default: one for each CPU; 1 with --executor "
                          "slurm]"),
        click.option("--executor", type=click.Choice(["local", "slurm"]), default="local", show_default=True,
                     help="Processes here, or a job array on the Slurm cluster."),
        click.option("--slurm-option", "slurm_options", metavar="KEY=VALUE", multiple=True,
                     help="With --executor slurm: an option of sbatch, like partition=cpu."),
        click.option("--out", type=_FOLDER, help="Write tables, plots and report.html into this folder."),
    )):  # fmt: skip
        command = decorate(command)
    return command


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@simulation_options
@click.option("--profiling-s", metavar="SECONDS", type=AMOUNT, default=0.0, show_default=True,
              help="Seconds that the first job of each model waits for its dry run.")  # fmt: skip
@click.option("--profile-noise", metavar="N_P", type=click.FloatRange(0, 1), default=0.0, show_default=True,
              help="n_p: policies see stage times × U[1 − n_p, 1 + n_p].")  # fmt: skip
@click.option("--no-checkpoints", is_flag=True, help="Jobs cannot resume after a stop, so policies never stop them.")
@click.option("--any-user", is_flag=True, help="Jobs of different users may share GPUs; on a cluster they never do.")
@click.option("--interference", "interference_file", metavar="FILE", type=click.Path(path_type=Path),
              help="Measured speeds of pairs on one GPU; the other pairs are estimated.")  # fmt: skip
@click.option("--slowdown", type=click.Choice(["pairs", "utilization"]), default="pairs", show_default=True,
              help="What slows jobs down on a shared GPU: pair speeds, or Horus's function.")  # fmt: skip
@click.option("--outage", "outages", type=outage, metavar="NODE:START:END[:drain]", multiple=True,
              help="A node is unavailable; times in seconds; may be repeated.")  # fmt: skip
@click.option("--seed", "seeds", metavar="SEED[,SEED…]", type=seeds, default="0", show_default=True,
              help="Seeds of the noise; several are averaged.")  # fmt: skip
@click.option("--steady-state", metavar="FIRST:LAST", type=job_range,
              help="Count only the jobs from FIRST up to, not including, LAST; 0 is the first.")  # fmt: skip
@click.option("--check", is_flag=True, help="Check every request to a policy and every step, not only the end.")
@options_of_runs
def sweep(**given: Any) -> None:
    """Simulate policies × traces × seeds, with all that a simulation can be told, and report with plots.

    The table, the JSON and the first options are those of `muri simulate`.

    \b
    Examples:
      muri-lab sweep jobs.csv --policy fifo,muri-l --unknown-durations --out report
      muri-lab sweep a.csv b.csv --policy srtf,muri-s --seed 0,1,2 --profile-noise 0.2 --jobs 4
      muri-lab sweep jobs.csv --policy fifo,auto --outage 3:3600:7200 --option max_group_size=2
      muri-lab sweep jobs.csv --policy sjf,sjf-bsbf,muri-jct --gpu-mem-gb 16 --interference pairs.csv
      muri-lab sweep jobs.csv --policy fifo,horus --slowdown utilization --gpu-mem-gb 11
      muri-lab sweep jobs.csv --policy srsf,muri-s --executor slurm --slurm-option partition=cpu --out report

    The table of --interference has a line for each pair of models, with the columns job_a, job_b, solo_a_iters_per_s,
    solo_b_iters_per_s, speed_a_fraction and speed_b_fraction.
    """
    from muri.simulator.metrics import document_of, print_tables, summarize

    check_how_it_runs(given)
    summaries = summarize(carry_out(given, _runs_of(given)))
    if given["out"] is not None:
        from muri_lab.report.write import write_report

        write_report(summaries, given["out"])
    if given["as_json"]:
        click.echo(json.dumps(document_of(summaries), indent=1))
        return
    from rich.console import Console

    print_tables(summaries, Console(highlight=False, markup=False))
    if given["out"] is not None:
        click.echo(f"report: {given['out'] / 'report.html'}")


def check_how_it_runs(given: Mapping[str, Any]) -> None:
    """Refuse options of Slurm without Slurm; make the folder of --out now rather than after hours of simulation."""
    folder: Path | None = given["out"]
    if given["slurm_options"] and given["executor"] != "slurm":
        raise UsageError("--slurm-option is for --executor slurm")
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".muri-writable").touch()
        (folder / ".muri-writable").unlink()
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror or error}; choose a folder that you may write to") from error


def carry_out(given: Mapping[str, Any], runs: "Sequence[Run]") -> "tuple[Outcome, ...]":
    """Simulate, in processes here or on Slurm, with a progress bar on a terminal."""
    from muri.simulator.run import progress_bar, sweep

    at_once: int | None = given["jobs"]
    with progress_bar([run.name for run in runs], shown=not given["as_json"]) as watch:
        if given["executor"] == "slurm":
            from muri_lab.sweep.on_slurm import sweep_on_slurm

            return sweep_on_slurm(runs, at_once or 1, given["slurm_options"], given["out"], watch)
        return sweep(runs, at_once or len(os.sched_getaffinity(0)), watch)


def _runs_of(given: Mapping[str, Any]) -> "tuple[Run, ...]":
    """The sweep: traces × policies × seeds, in this order."""
    from muri.simulator.model import Run

    options, cluster, out = checked_options(given), cluster_of(given), given["out"]
    _check_model(given)
    for each in given["outages"]:
        if each.node >= given["nodes"]:
            last_node = given["nodes"] - 1
            raise UsageError(f"--outage of node {each.node}: the {given['nodes']} nodes are 0 to {last_node}")
    traces = read_traces(given["trace_files"], given["trace_format"], skip_bad_rows=given["skip_bad_rows"])
    first, last = given["steady_state"] or (None, None)
    _check_steady_state(traces, last)
    # A report shows all jobs; figures of a steady state do not need the later jobs to end.
    base = replace(_settings_of(given), until=None if out else last)
    return tuple(
        Run(name, trace, name, cluster, replace(base, seed=seed), options[name], first, last, out is not None)
        for trace, name, seed in product(traces, given["policies"], given["seeds"])
    )


def _settings_of(given: Mapping[str, Any]) -> "Settings":
    from muri.simulator.model import Settings

    return Settings(
        **{name: given[name] for name in _SETTINGS},
        durations_known=not given["unknown_durations"],
        checkpoints=not given["no_checkpoints"],
        interference=() if given["interference_file"] is None else read_interference(given["interference_file"]),
    )


def read_interference(file: Path) -> "tuple[PairSpeed, ...]":
    """Read measured speeds of pairs."""
    from muri.policies.traits import InterferenceError
    from muri_lab.interference.pairs_table import parse_interference

    try:
        return parse_interference(file.read_text(encoding="utf-8").splitlines()).rows
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read --interference {file}: {reason}") from error
    except InterferenceError as error:
        raise UsageError(f"{file}: {error}") from error


def _check_model(given: Mapping[str, Any]) -> None:
    """Refuse options that the reference model would silently ignore."""
    from muri.policies.registry import get_policy

    if given["any_user"] and given["model"] == "live":
        raise UsageError("--any-user is not for --model live: a group's process runs as one user")
    name = "--interference" if given["interference_file"] is not None else "--slowdown"
    by_use = given["slowdown"] != "pairs"
    if given["model"] == "reference" and (given["interference_file"] is not None or by_use):
        raise UsageError(f"{name} is for --model default; the reference model has no jobs that share without turns")
    if by_use and not any(get_policy(policy).supports_packing for policy in given["policies"]):
        raise UsageError(
            f"--slowdown is for policies whose jobs share GPUs one by one, like horus or sjf-bsbf; "
            f"--policy names none of them: {', '.join(given['policies'])}"
        )


def _check_steady_state(traces: "Sequence[Trace]", last: int | None) -> None:
    for trace in traces:
        if last is not None and last > len(trace.jobs):
            raise UsageError(
                f"--steady-state ends before job {last}, but {trace.name} has {len(trace.jobs)} jobs; "
                f"the last valid is {len(trace.jobs)}"
            )
