"""The commands `muri simulate` and `muri trace …`, and what `muri-lab sweep` has in common with the first."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from muri.commands import Group
from muri.errors import UsageError
from muri.profiler.records import RESOURCES
from muri.text import counted

if TYPE_CHECKING:
    from muri.simulator.model import Cluster, Trace
    from muri.simulator.traces.read import TraceReading

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

    from muri.simulator.metrics import document_of, print_tables, summarize
    from muri.simulator.model import Run, Settings
    from muri.simulator.run import progress_bar, sweep

    options = checked_options(given)
    cluster = cluster_of(given)
    settings = Settings(model=given["model"], interval_s=given["interval_s"], restart_s=given["restart_s"],
                        durations_known=not given["unknown_durations"])  # fmt: skip
    traces = read_traces(given["trace_files"])
    runs = [Run(name, trace, name, cluster, settings, options[name]) for trace in traces for name in given["policies"]]
    with progress_bar([run.name for run in runs], shown=not given["as_json"]) as watch:
        summaries = summarize(sweep(runs, len(os.sched_getaffinity(0)), watch))
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


class Weights(click.ParamType[dict[str, float]]):
    """A list such as `1=0.7,2=0.3`; a name without a weight counts 1."""

    name = "weights"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, float]:
        """Names and their weights."""
        weights: dict[str, float] = {}
        for part in str(value).split(","):
            name, separator, weight = part.strip().partition("=")
            try:
                weights[name] = float(weight) if separator else 1.0
            except ValueError:
                self.fail(f"{part!r} is not of the form NAME=WEIGHT", param, ctx)
            if not name:
                self.fail("a name is missing; write for instance gpu=2,network=1", param, ctx)
        return weights


def _read_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for reading, handed over as the arguments of `_read`."""
    for decorate in (
        click.option(
            "--profiles",
            metavar="JSON",
            type=click.Path(dir_okay=False, path_type=Path),
            help="For traces without stage times: assign these, from `muri profile export`.  "
            "[default: the Muri paper's models]",
        ),
        click.option(
            "--profile-seed",
            "seed",
            type=click.IntRange(0),
            default=0,
            show_default=True,
            help="For traces without stage times: seeds which model's profile each job gets.",
        ),
        click.option("--skip-bad-rows", is_flag=True, help="Leave bad rows out and count them."),
        click.option(
            "--from",
            "format_name",
            metavar="FORMAT",
            help="The file's format; see `muri trace import --help`.  [default: guessed]",
        ),
    ):
        command = decorate(command)
    return command


_file_argument = click.argument("file", type=click.Path(allow_dash=True, path_type=Path))
_output_option = click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file instead of printing."
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_gpus_option = click.option("--gpus", type=click.IntRange(1), help="Show the load of a cluster with this many GPUs.")


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def trace() -> None:
    """Import, generate and check traces for `muri simulate`.

    A trace lists jobs: submit time, GPUs, iterations, and the time that one iteration needs of
    storage, CPU, GPU and network. docs/traces.md describes Muri's schema.

    \b
    Examples:
      muri trace import --from sacct last-month.txt -o last-month.csv
      muri trace generate --jobs 1000 --gpus 64 --load 0.9 --seed 1 -o t.csv
      muri trace check t.csv --gpus 64
    """


class _ImportCommand(click.Command):
    """Shows the formats and the sacct command in its help."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the formats, and how to get a trace of a real cluster."""
        from muri.simulator.traces.log_formats import SACCT_COMMAND
        from muri.simulator.traces.read import FORMATS  # only for this help page

        with formatter.section("Formats"):
            formatter.write_dl([(item.name, item.summary) for item in FORMATS.values()])
        with formatter.section("What your cluster did in the last 30 days (--from sacct)"):
            formatter.write("".join(f"    {line}\n" for line in f"{SACCT_COMMAND} \\\n  > last-month.txt".splitlines()))
            formatter.write("    muri trace import --from sacct last-month.txt -o last-month.csv\n")


@trace.command("import", cls=_ImportCommand, short_help="Turn another trace into Muri's schema.")
@_file_argument
@_read_options
@_output_option
def import_command(file: Path, output: Path | None, **options: Any) -> None:
    """Turn FILE, a trace of any known format, into Muri's schema; - reads the standard input.

    Jobs without GPUs, and jobs that never ran or had not ended, are left out and counted. If a log
    has no stage times, its jobs get profiles of known models by a seeded assignment.

    \b
    Examples:
      muri trace import --from philly cluster_job_log -o philly.csv
      muri trace import --from helios cluster_log.csv --skip-bad-rows -o venus.csv
      muri trace import --from pai folder-with-both-tables -o pai.csv
      muri trace import --from sacct last-month.txt --profiles profiles.json
    """
    reading = _read(file, **options)
    _write(reading.trace, output)
    _report(reading, "imported" if output else "printed")


@trace.command("generate", short_help="Generate a trace: Philly-like, at a given load.")
@click.option("--jobs", type=click.IntRange(1), required=True, help="How many jobs.")
@click.option("--gpus", type=click.IntRange(1), required=True, help="GPUs of the cluster that the load is meant for.")
@click.option(
    "--load", type=float, default=0.9, show_default=True, help="GPU-seconds of the jobs over those of the cluster."
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="The same seed gives the same trace."
)
@click.option("--gpu-mix", type=Weights(), help="Weights of GPU counts.  [default: 1=0.762,2=0.02,4=0.093,8=0.125]")
@click.option("--bottlenecks", type=Weights(), default=",".join(RESOURCES), show_default=True, help="Their weights.")
@click.option(
    "--models",
    type=click.Choice(("muri", "synergy")),
    default="muri",
    show_default=True,
    help="What jobs train: the Muri paper's models, by --bottlenecks; or Synergy's, each as often, with batch models.",
)
@click.option("--users", type=click.IntRange(1), default=20, show_default=True, help="How many users.")
@click.option("--opportunistic", type=float, default=0.5, show_default=True, help="Share of opportunistic jobs.")
@click.option(
    "--durations",
    metavar="FLOOR,MEDIAN,SIGMA,LONGEST",
    help="Log-normal above a floor, seconds.  [default: Philly's, by GPU count]",
)
@click.option(
    "--pairs",
    metavar="TABLE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Instead of --models: those of this table of pair speeds, as `muri-lab sweep --interference` takes it, "
    "each as often, with batch models; memory is assumed.",
)
@_output_option
def generate_command(output: Path | None, **figures: Any) -> None:
    """Generate a trace.

    Durations and GPU counts are like those of Microsoft's Philly cluster, arrivals are a Poisson
    process, bottlenecks and users are drawn by weight. The same options give the same file.

    \b
    Examples:
      muri trace generate --jobs 1000 --gpus 64 --load 0.9 --seed 1 -o t.csv
      muri trace generate --jobs 500 --gpus 32 --bottlenecks storage=2,gpu=1
      muri trace generate --jobs 99 --gpus 8 --gpu-mix 1=0.8,2=0.2 \\
          --durations 60,600,1.5,86400 -o short.csv
      muri trace generate --jobs 240 --gpus 64 --pairs pairs.csv -o pairs-240.csv
    """
    from muri.simulator.traces.generator import generate  # numbers and tables only when needed

    made = generate(_recipe(output, figures))
    _write(made, output)
    if output is not None:
        click.echo(f"wrote {counted(len(made.jobs), 'job')} to {output}", err=True)


@trace.command("check", short_help="Check that a trace can be read, and describe it.")
@_file_argument
@_gpus_option
@_read_options
@_json_option
def check_command(file: Path, gpus: int | None, as_json: bool, **options: Any) -> None:
    """Check that FILE, of any known format, is a valid trace, and describe it. Exit code 0: it is; 2: it is not.

    The message names file, line and column of the first five bad rows and counts the others.

    \b
    Examples:
      muri trace check t.csv --gpus 64
      muri trace check --from helios cluster_log.csv --skip-bad-rows
      muri trace check t.csv --json | jq .by_bottleneck
    """
    from muri.simulator.traces.read import overview_of, print_overview

    reading = _read(file, **options)
    overview = overview_of(reading.trace)
    if as_json:
        document = {"format": reading.format, **overview.as_json(gpus), "skipped_rows": reading.trace.skipped_rows}
        click.echo(json.dumps({**document, "left_out": reading.left_out}, indent=2, ensure_ascii=False))
        return
    from rich.console import Console  # rich takes a while to load

    _report(reading, "good", err=False)
    print_overview(Console(highlight=False), overview, gpus)


def _read(file: Path, format_name: str | None, profiles: Path | None, **how: Any) -> "TraceReading":
    from muri.profiler.exchange import from_json
    from muri.simulator.traces.read import read_with_notes  # `muri --help` stays fast

    known = None if profiles is None else from_json(_text(profiles), str(profiles))
    return read_with_notes(file, format_name, profiles=known, **how)


def _text(path: Path) -> str:
    from muri.simulator.traces.rows import TraceError

    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 text (byte {error.start})") from error


def _write(made: "Trace", output: Path | None) -> None:
    from muri.simulator.traces.schema import write_rows, write_trace

    if output is None:
        with click.open_file("-", "w", encoding="utf-8") as stream:
            write_rows(made, stream)
    else:
        write_trace(made, output)


def _report(reading: "TraceReading", done: str, *, err: bool = True) -> None:
    """Print what was read, and what was left out."""
    jobs, skipped = len(reading.trace.jobs), reading.trace.skipped_rows
    click.echo(f"{done}: {jobs} {'job' if jobs == 1 else 'jobs'} (format {reading.format})", err=err)
    if skipped:
        click.echo(f"skipped: {skipped} bad {'row' if skipped == 1 else 'rows'}", err=err)
    for reason, count in sorted(reading.left_out.items()):
        click.echo(f"left out: {count} that {reason}", err=err)


def _recipe(output: Path | None, figures: Mapping[str, Any]) -> Any:
    """The generator's recipe from the command's options."""
    from muri.simulator.traces.generator import PHILLY_GPU_MIX, Recipe
    from muri.simulator.traces.models import batched_models, models_of_pairs

    chosen = dict(figures)
    gpu_mix, models, pairs = chosen.pop("gpu_mix"), chosen.pop("models"), chosen.pop("pairs")
    if pairs is not None and models != "muri":
        raise click.BadParameter(f"both --models {models} and --pairs say what jobs train; give one of them")
    trained = batched_models() if models == "synergy" else ()
    return Recipe(
        models=trained if pairs is None else models_of_pairs(_text(pairs).splitlines()),
        **chosen | {"durations": _durations(chosen["durations"])},
        gpu_mix=PHILLY_GPU_MIX if gpu_mix is None else _gpu_counts(gpu_mix),
        name="generated" if output is None else output.stem,
    )


def _gpu_counts(weights: Mapping[str, float]) -> dict[int, float]:
    wrong = [name for name in weights if not (name.isascii() and name.isdigit())]
    if wrong:
        raise click.BadParameter(f"{wrong[0]!r} is not a number of GPUs; write for instance 1=0.8,2=0.2")
    return {int(name): weight for name, weight in weights.items()}


def _durations(text: str | None) -> Any:
    from muri.simulator.traces.generator import Durations

    if text is None:
        return None
    try:
        floor_s, median_s, sigma, longest_s = (float(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not FLOOR,MEDIAN,SIGMA,LONGEST, such as 60,600,1.5,86400") from None
    return Durations(floor_s, median_s, sigma, longest_s)
