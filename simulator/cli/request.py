"""What the command line of `muri simulate` asked for, as runs of a sweep."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import click

from muri.errors import UsageError
from muri.foreign_yaml import yaml_of
from muri.policies.registry import get_policy
from muri.policies.speed.pairs import InterferenceError, PairSpeed, parse_interference
from muri.simulator.model import Cluster, Outage, Settings, Trace
from muri.simulator.run import check_policies
from muri.simulator.sweep.runs import Run
from muri.simulator.traces.read import read_trace


@dataclass(frozen=True, slots=True)
class Request:
    """The command line of `muri simulate`, option by option."""

    trace_files: tuple[Path, ...]
    trace_format: str | None
    policies: tuple[str, ...]
    options: tuple[str, ...]
    nodes: int
    gpus_per_node: int
    gpu_mem_gib: float
    cpus_per_node: float
    mem_gib_per_node: float
    model: Literal["default", "reference", "live"]
    interval_s: float
    restart_s: float
    profiling_s: float
    profile_noise: float
    interference_file: Path | None
    slowdown: Literal["pairs", "utilization"]
    unknown_durations: bool
    no_checkpoints: bool
    any_user: bool
    outages: tuple[Outage, ...]
    seeds: tuple[int, ...]
    steady_state: tuple[int, int] | None
    skip_bad_rows: bool
    check: bool
    jobs: int
    executor: str
    slurm_options: tuple[str, ...]
    experiment: str | None
    traces_folder: Path | None
    out: Path | None
    as_json: bool

    @property
    def cluster(self) -> Cluster:
        """The cluster to simulate."""
        memory = {"gpu_mem_gib": self.gpu_mem_gib, "mem_gib_per_node": self.mem_gib_per_node}
        return Cluster(self.nodes, self.gpus_per_node, cpus_per_node=self.cpus_per_node, **memory)

    @property
    def settings(self) -> Settings:
        """How to simulate, with the first seed."""
        return Settings(
            model=self.model,
            interval_s=self.interval_s,
            restart_s=self.restart_s,
            profile_noise=self.profile_noise,
            profiling_s=self.profiling_s,
            durations_known=not self.unknown_durations,
            outages=self.outages,
            seed=self.seeds[0],
            checkpoints=not self.no_checkpoints,
            interference=() if self.interference_file is None else read_interference(self.interference_file),
            slowdown=self.slowdown,
            any_user=self.any_user,
            check=self.check,
        )


def runs_of(request: Request) -> tuple[Run, ...]:
    """The sweep: traces × policies × seeds, in this order.

    Raises:
        UsageError: A policy, an option, an outage or the steady state makes no sense; found before the sweep starts.
    """
    options = {name: options_for(name, parse_options(request.options)) for name in request.policies}
    _check_targets(request)
    _check_model(request)
    check_policies(request.model, options)
    _check_outages(request)
    traces = read_traces(request.trace_files, request.trace_format, skip_bad_rows=request.skip_bad_rows)
    first, last = request.steady_state or (None, None)
    _check_steady_state(traces, last)
    # A report shows all jobs; figures of a steady state do not need the later jobs to end.
    base, cluster = replace(request.settings, until=None if request.out else last), request.cluster
    return tuple(
        Run(name, trace, name, cluster, replace(base, seed=seed), options[name], first, last, request.out is not None)
        for trace, name, seed in product(traces, request.policies, request.seeds)
    )


def read_traces(files: Sequence[Path], trace_format: str | None, *, skip_bad_rows: bool) -> tuple[Trace, ...]:
    """Read the traces; traces whose files have the same name are named by their paths."""
    traces = [read_trace(file, trace_format, skip_bad_rows=skip_bad_rows) for file in files]
    names = [trace.name for trace in traces]
    named = [
        replace(trace, name=str(file)) if names.count(trace.name) > 1 else trace
        for trace, file in zip(traces, files, strict=True)
    ]
    return tuple(named)


def read_interference(file: Path) -> tuple[PairSpeed, ...]:
    """Read measured speeds of pairs.

    Raises:
        UsageError: The file cannot be read, or a line is wrong.
    """
    try:
        return parse_interference(file.read_text(encoding="utf-8").splitlines()).rows
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UsageError(f"cannot read --interference {file}: {reason}") from error
    except InterferenceError as error:
        raise UsageError(f"{file}: {error}") from error


def parse_options(words: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Policy options by policy; options for all policies under "".

    Args:
        words: Each `key=value` or `policy:key=value`; values as YAML writes them.

    Raises:
        click.BadParameter: A word is neither.
    """
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


def options_for(policy: str, options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The options of one policy: those for all, overridden by its own."""
    return {**options.get("", {}), **options.get(policy, {})}


def _check_model(request: Request) -> None:
    """Refuse options that the reference model would silently ignore."""
    if request.any_user and request.model == "live":
        raise UsageError("--any-user is not for --model live: a group's process runs as one user")
    name = "--interference" if request.interference_file is not None else "--slowdown"
    if request.model == "reference" and (request.interference_file is not None or request.slowdown != "pairs"):
        raise UsageError(f"{name} is for --model default; the reference model has no jobs that share without turns")
    if request.slowdown != "pairs" and not any(get_policy(name).supports_packing for name in request.policies):
        raise UsageError(
            f"--slowdown is for policies whose jobs share GPUs one by one, like horus or sjf-bsbf; "
            f"--policy names none of them: {_listed(request.policies)}"
        )


def _check_targets(request: Request) -> None:
    unused = sorted(set(parse_options(request.options)) - {"", *request.policies})
    if unused:
        raise UsageError(
            f"--option for {_listed(unused)}, which --policy does not name; it names {_listed(request.policies)}"
        )


def _check_outages(request: Request) -> None:
    for outage in request.outages:
        if outage.node >= request.nodes:
            raise UsageError(f"--outage of node {outage.node}: the {request.nodes} nodes are 0 to {request.nodes - 1}")


def _check_steady_state(traces: Sequence[Trace], last: int | None) -> None:
    for trace in traces:
        if last is not None and last > len(trace.jobs):
            raise UsageError(
                f"--steady-state ends before job {last}, but {trace.name} has {len(trace.jobs)} jobs; "
                f"the last valid is {len(trace.jobs)}"
            )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
