"""The command `muri simulate`."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from muri.errors import UsageError
from muri.simulator.model import Outage

if TYPE_CHECKING:
    from muri.simulator.cli.request import Request
    from muri.simulator.sweep.runs import Outcome, Run


_WITH_EXPERIMENT: Final = {
    "trace_files", "traces_folder", "trace_format", "skip_bad_rows", "jobs", "executor", "slurm_options", "experiment",
    "out", "as_json",
}  # fmt: skip

_AMOUNT: Final = click.FloatRange(min=0)
_FILE: Final = click.Path(path_type=Path)
_FOLDER: Final = click.Path(path_type=Path, file_okay=False)
_OUTAGE: Final = re.compile(r"(\d+):(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)(:drain)?", re.ASCII)
_RANGE: Final = re.compile(r"(\d+):(\d+)", re.ASCII)


def names(text: str) -> tuple[str, ...]:
    """Names with commas between them; none may be empty or repeated."""
    found = tuple(name.strip() for name in text.split(","))
    if not all(found):
        raise click.BadParameter(f"{text!r} has an empty name; write for example srtf,muri-s")
    repeated = sorted({name for name in found if found.count(name) > 1})
    if repeated:
        raise click.BadParameter(f"{', '.join(repeated)} is given more than once")
    return found


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


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("trace_files", metavar="TRACE...", nargs=-1, type=_FILE)
@click.option("--policy", "policies", metavar="NAME[,NAME…]", type=names,
              help="Policies to compare; the first is the base.")  # fmt: skip
@click.option(
    "--nodes", metavar="N", type=click.IntRange(min=1), default=8, show_default=True, help="Nodes of the cluster."
)
@click.option(
    "--gpus-per-node", metavar="N", type=click.IntRange(min=1), default=8, show_default=True, help="GPUs of each node."
)
@click.option(
    "--gpu-mem-gb", "gpu_mem_gib", metavar="GIB", type=_AMOUNT, default=0.0, help="Memory of each GPU; 0: unlimited."
)
@click.option(
    "--cpus-per-node",
    metavar="N",
    type=_AMOUNT,
    default=0.0,
    help="CPUs of each node, shared out by Synergy's policies; 0: unlimited.",
)
@click.option("--mem-gb-per-node", "mem_gib_per_node", metavar="GIB", type=_AMOUNT, default=0.0,
              help="Host memory of each node, shared out likewise; 0: unlimited.")  # fmt: skip
@click.option("--model", type=click.Choice(["default", "reference", "live"]), default="default", show_default=True,
              help="default: physically sound; reference: as in Muri's and Synergy's public simulators; live: the real "
                   "controller on a virtual Slurm, every six minutes unless --interval differs.")  # fmt: skip
@click.option("--interval", "interval_s", metavar="SECONDS", type=_AMOUNT, default=0.0, show_default=True,
              help="Seconds between two plans; 0: at every arrival and completion.")  # fmt: skip
@click.option("--restart-s", metavar="SECONDS", type=_AMOUNT, default=30.0, show_default=True,
              help="Seconds lost by a start, regrouping or move.")  # fmt: skip
@click.option("--profiling-s", metavar="SECONDS", type=_AMOUNT, default=0.0, show_default=True,
              help="Seconds that the first job of each model waits for its dry run.")  # fmt: skip
@click.option("--profile-noise", metavar="N_P", type=click.FloatRange(0, 1), default=0.0, show_default=True,
              help="n_p: policies see stage times × U[1 − n_p, 1 + n_p].")  # fmt: skip
@click.option("--unknown-durations", is_flag=True, help="Policies do not know how long jobs will run.")
@click.option("--no-checkpoints", is_flag=True, help="Jobs cannot resume after a stop, so policies never stop them.")
@click.option("--any-user", is_flag=True, help="Jobs of different users may share GPUs; on a cluster they never do.")
@click.option("--interference", "interference_file", metavar="FILE", type=_FILE,
              help="Measured speeds of pairs on one GPU; the other pairs are estimated.")  # fmt: skip
@click.option("--slowdown", type=click.Choice(["pairs", "utilization"]), default="pairs", show_default=True,
              help="What slows jobs down on a shared GPU: pair speeds, or Horus's function.")  # fmt: skip
@click.option("--outage", "outages", type=outage, metavar="NODE:START:END[:drain]", multiple=True,
              help="A node is unavailable; times in seconds; may be repeated.")  # fmt: skip
@click.option("--option", "options", metavar="[POLICY:]KEY=VALUE", multiple=True,
              help="An option of all policies, or of one; may be repeated.")  # fmt: skip
@click.option("--seed", "seeds", metavar="SEED[,SEED…]", type=seeds, default="0", show_default=True,
              help="Seeds of the noise; several are averaged.")  # fmt: skip
@click.option("--steady-state", metavar="FIRST:LAST", type=job_range,
              help="Count only the jobs from FIRST up to, not including, LAST; 0 is the first.")  # fmt: skip
@click.option("--check", is_flag=True, help="Check every request to a policy and every step, not only the end.")
@click.option("--format", "trace_format", metavar="FORMAT", help="Format of the traces; guessed when left out.")
@click.option("--skip-bad-rows", is_flag=True, help="Leave bad rows out, and count them.")
@click.option(
    "--jobs",
    metavar="N",
    type=click.IntRange(min=1),
    help="Simulations that run at the same time.  [default: one for each CPU; 1 with --executor slurm]",
)
@click.option("--executor", type=click.Choice(["local", "slurm"]), default="local", show_default=True,
              help="Processes here, or a job array on the Slurm cluster.")  # fmt: skip
@click.option("--slurm-option", "slurm_options", metavar="KEY=VALUE", multiple=True,
              help="With --executor slurm: an option of sbatch, like partition=cpu.")  # fmt: skip
@click.option("--experiment", metavar="NAME", help="A figure or table of the Muri paper, or a file of your own.")
@click.option("--traces", "traces_folder", type=_FOLDER, help="With --experiment: where its traces lie.")
@click.option("--out", type=_FOLDER, help="Write tables, plots and report.html into this folder.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def simulate(**given: Any) -> None:
    """Simulate policies on the jobs of a trace.

    TRACE is a file in any format that `muri trace` knows; nothing needs to be installed on the cluster. In the
    table, QUEUE is the mean number of waiting jobs, GPU the busy share of the GPUs' time, and SPEED-UP the average
    completion time of the first policy over that of this policy.

    \b
    Examples:
      muri simulate jobs.csv --policy srsf,muri-s --nodes 8 --gpus-per-node 8
      muri simulate jobs.csv --policy fifo,muri-l --unknown-durations --out report
      muri simulate a.csv b.csv --policy srtf,muri-s --seed 0,1,2 --profile-noise 0.2 --jobs 4
      muri simulate jobs.csv --policy muri-s,muri-jct --model live
      muri simulate jobs.csv --policy fifo,auto --outage 3:3600:7200 --option max_group_size=2
      muri simulate jobs.csv --policy fifo,synergy --cpus-per-node 24 --mem-gb-per-node 500
      muri simulate jobs.csv --policy sjf,sjf-bsbf,muri-jct --gpu-mem-gb 16 --interference pairs.csv
      muri simulate --experiment fig9 --traces traces --out fig9
      muri simulate jobs.csv --policy muri-s --json | jq '.policies["muri-s"].avg_jct_s'

    The table of --interference has a line for each pair of models, with the columns job_a, job_b, solo_a_iters_per_s,
    solo_b_iters_per_s, speed_a_fraction and speed_b_fraction. `muri policies` lists the policies; docs/simulator.md
    explains the models, the options and every field of the JSON.
    """
    from muri.simulator.cli.request import Request

    at_a_time = given["jobs"] or (1 if given["executor"] == "slurm" else len(os.sched_getaffinity(0)))
    request = Request(**{**given, "policies": given["policies"] or (), "jobs": at_a_time})
    _check(request)
    if request.out is not None:
        _make_folder(request.out)
    if request.experiment is not None:
        _run_experiment(request)
    else:
        _run_sweep(request)


def _check(request: "Request") -> None:
    from muri.policies.registry import policy_names

    if request.slurm_options and request.executor != "slurm":
        raise UsageError("--slurm-option is for --executor slurm")
    if request.experiment is not None:
        _check_left_to_the_experiment()
        return
    if request.traces_folder is not None:
        raise UsageError("--traces is for --experiment; name the trace files themselves")
    if not request.trace_files:
        raise UsageError("no trace; name a file, or --experiment NAME with --traces DIR")
    if not request.policies:
        raise UsageError(f"no policy; say --policy with some of: {', '.join(policy_names())}")


def _check_left_to_the_experiment() -> None:
    """Refuse options that the experiment's file sets, rather than ignore them."""
    context = click.get_current_context()
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in _WITH_EXPERIMENT
        and context.get_parameter_source(str(parameter.name)) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise UsageError(f"--experiment names its own policies, cluster and settings; leave out {', '.join(given)}")


def _make_folder(folder: Path) -> None:
    """Make the folder of --out now rather than after hours of simulation."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".muri-writable").touch()
        (folder / ".muri-writable").unlink()
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror or error}; choose a folder that you may write to") from error


def _run_sweep(request: "Request") -> None:
    from muri.simulator.cli.request import runs_of
    from muri.simulator.sweep.summary import document_of, print_tables, summarise

    summaries = summarise(_carry_out(request, runs_of(request)))
    if request.out is not None:
        from muri.simulator.report.write import write_report

        write_report(summaries, request.out)
    if request.as_json:
        click.echo(json.dumps(document_of(summaries), indent=1))
        return
    from rich.console import Console

    print_tables(summaries, Console(highlight=False, markup=False))
    if request.out is not None:
        click.echo(f"report: {request.out / 'report.html'}")


def _run_experiment(request: "Request") -> None:
    from muri.simulator.cli.request import read_traces
    from muri.simulator.experiments.experiment import find_traces, load_experiment, runs_of_experiment
    from muri.simulator.experiments.page import Findings, markdown_page, write_experiment
    from muri.simulator.sweep.summary import document_of, summarise

    experiment = load_experiment(str(request.experiment))
    found = find_traces(experiment, request.traces_folder, request.trace_files)
    files = tuple(found.files.values())
    read = read_traces(files, request.trace_format, skip_bad_rows=request.skip_bad_rows)
    traces = [replace(trace, name=name) for trace, name in zip(read, found.files, strict=True)]
    summaries = summarise(_carry_out(request, runs_of_experiment(experiment, traces)))
    findings = Findings.of(experiment, summaries, found.missing)
    text = markdown_page(findings)
    if request.out is not None:
        write_experiment(findings, summaries, request.out)
    if request.as_json:
        document = {"experiment": request.experiment, **findings.as_json()}
        click.echo(json.dumps({**document, **document_of(summaries)}, indent=1))
    else:
        click.echo(text)


def _carry_out(request: "Request", runs: "tuple[Run, ...]") -> "tuple[Outcome, ...]":
    from muri.simulator.sweep.runs import progress_bar, sweep

    with progress_bar([run.name for run in runs], shown=not request.as_json) as watch:
        if request.executor == "slurm":
            from muri.simulator.sweep.on_slurm import sweep_on_slurm

            return sweep_on_slurm(runs, request.jobs, request.slurm_options, request.out, watch)
        return sweep(runs, request.jobs, watch)
