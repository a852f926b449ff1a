"""The command `muri simulate`, and what `muri-lab sweep` has in common with it."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from muri.errors import UsageError

if TYPE_CHECKING:
    from muri.simulator.model import Cluster, Trace

AMOUNT: Final = click.FloatRange(min=0)


def names(text: str) -> tuple[str, ...]:
    """Names with commas between them; none may be empty or repeated."""
    found = tuple(name.strip() for name in text.split(","))
    if not all(found):
        raise click.BadParameter(f"{text!r} has an empty name; write for example srtf,muri-s")
    repeated = sorted({name for name in found if found.count(name) > 1})
    if repeated:
        raise click.BadParameter(f"{', '.join(repeated)} is given more than once")
    return found


def simulation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the traces, and the options that say what is simulated on which cluster."""
    for decorate in reversed((
        click.argument("trace_files", metavar="TRACE...", nargs=-1, type=click.Path(path_type=Path)),
        click.option("--policy", "policies", metavar="NAME[,NAME…]", type=names,
                     help="Policies to compare; the first is the base."),
        click.option("--option", "options", metavar="[POLICY:]KEY=VALUE", multiple=True,
                     help="An option of all policies, or of one; may be repeated."),
        click.option("--nodes", metavar="N", type=click.IntRange(min=1), default=8, show_default=True,
                     help="Nodes of the cluster."),
        click.option("--gpus-per-node", metavar="N", type=click.IntRange(min=1), default=8, show_default=True,
                     help="GPUs of each node."),
        click.option("--gpu-mem-gb", "gpu_mem_gib", metavar="GIB", type=AMOUNT, default=0.0,
                     help="Memory of each GPU; 0: unlimited."),
        click.option("--cpus-per-node", metavar="N", type=AMOUNT, default=0.0,
                     help="CPUs of each node, shared out by Synergy's policies; 0: unlimited."),
        click.option("--mem-gb-per-node", "mem_gib_per_node", metavar="GIB", type=AMOUNT, default=0.0,
                     help="Host memory of each node, shared out likewise; 0: unlimited."),
        click.option("--model", metavar="NAME", default="default", show_default=True,
                     help="default: physically sound. Of the lab: live, the real controller on a virtual Slurm, every "
                          "six minutes unless --interval differs; reference, as in Muri's and Synergy's public "
                          "simulators."),
        click.option("--interval", "interval_s", metavar="SECONDS", type=AMOUNT, default=0.0, show_default=True,
                     help="Seconds between two plans; 0: at every arrival and completion."),
        click.option("--restart-s", metavar="SECONDS", type=AMOUNT, default=30.0, show_default=True,
                     help="Seconds lost by a start, regrouping or move."),
        click.option("--unknown-durations", is_flag=True, help="Policies do not know how long jobs will run."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    )):  # fmt: skip
        command = decorate(command)
    return command


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@simulation_options
def simulate(**given: Any) -> None:
    """Simulate policies on the jobs of a trace.

    TRACE is a file in any format that `muri trace` knows; nothing needs to be installed on the cluster. In the
    table, QUEUE is the mean number of waiting jobs, GPU the busy share of the GPUs' time, and SPEED-UP the average
    completion time of the first policy over that of this policy.

    \b
    Examples:
      muri simulate jobs.csv --policy srsf,muri-s --nodes 8 --gpus-per-node 8
      muri simulate jobs.csv --policy fifo,muri-l --unknown-durations
      muri simulate jobs.csv --policy muri-s,muri-jct --model live
      muri simulate jobs.csv --policy fifo,auto --option max_group_size=2
      muri simulate jobs.csv --policy fifo,synergy --cpus-per-node 24 --mem-gb-per-node 500
      muri simulate jobs.csv --policy muri-s --json | jq '.policies["muri-s"].avg_jct_s'

    `muri policies` lists the policies; docs/simulator.md explains the models, the options and every field of the
    JSON. `muri-lab sweep` (pip install ./lab) has more options: seeds and noise, outages, measured pairs, reports
    with plots, runs on Slurm.
    """
    from rich.console import Console

    from muri.simulator.metrics import document_of, print_tables, summarise
    from muri.simulator.model import Run, Settings
    from muri.simulator.run import progress_bar, sweep

    options = checked_options(given)
    cluster = cluster_of(given)
    settings = Settings(model=given["model"], interval_s=given["interval_s"], restart_s=given["restart_s"],
                        durations_known=not given["unknown_durations"])  # fmt: skip
    traces = read_traces(given["trace_files"])
    runs = [Run(name, trace, name, cluster, settings, options[name]) for trace in traces for name in given["policies"]]
    with progress_bar([run.name for run in runs], shown=not given["as_json"]) as watch:
        summaries = summarise(sweep(runs, len(os.sched_getaffinity(0)), watch))
    if given["as_json"]:
        click.echo(json.dumps(document_of(summaries), indent=1))
    else:
        print_tables(summaries, Console(highlight=False, markup=False))


def cluster_of(given: Mapping[str, Any]) -> "Cluster":
    """The cluster that a command line describes."""
    from muri.simulator.model import Cluster

    sizes = {name: given[name] for name in ("gpus_per_node", "gpu_mem_gib", "cpus_per_node", "mem_gib_per_node")}
    return Cluster(given["nodes"], **sizes)


def checked_options(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The options of each policy.

    Raises:
        UsageError: Traces or policies are missing, or a policy or an option of one makes no sense.
    """
    from muri.policies.registry import policy_names
    from muri.simulator.run import check_policies

    policies: Sequence[str] = given["policies"] or ()
    if not given["trace_files"]:
        raise UsageError("no trace; name a file")
    if not policies:
        raise UsageError(f"no policy; say --policy with some of: {', '.join(policy_names())}")
    chosen = parse_options(given["options"])
    if unused := sorted(set(chosen) - {"", *policies}):
        raise UsageError(
            f"--option for {', '.join(unused)}, which --policy does not name; it names {', '.join(policies)}"
        )
    options = {name: {**chosen.get("", {}), **chosen.get(name, {})} for name in policies}
    check_policies(given["model"], options)
    return options


def parse_options(words: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Policy options by policy; options for all policies under "".

    Raises:
        click.BadParameter: A word is neither.
    """
    from muri.text import yaml_of

    options: dict[str, dict[str, Any]] = {}
    for word in words:
        target, equals, text = word.partition("=")
        policy, _, key = target.rpartition(":")
        try:
            value = yaml_of(text)
        except ValueError:
            value = None
        if not (equals and key.strip()) or value is None:
            raise click.BadParameter(
                f"{word!r} must be KEY=VALUE or POLICY:KEY=VALUE, like max_group_size=2 or muri-l:max_group_size=2",
                param_hint="--option",
            )
        options.setdefault(policy.strip(), {})[key.strip()] = tuple(value) if isinstance(value, list) else value
    return options


def read_traces(
    files: Sequence[Path], trace_format: str | None = None, *, skip_bad_rows: bool = False
) -> "tuple[Trace, ...]":
    """Read the traces; traces whose files have the same name are named by their paths."""
    from muri.simulator.traces.read import read_trace

    traces = [read_trace(file, trace_format, skip_bad_rows=skip_bad_rows) for file in files]
    stems = [trace.name for trace in traces]
    return tuple(
        replace(trace, name=str(file)) if stems.count(trace.name) > 1 else trace
        for trace, file in zip(traces, files, strict=True)
    )
