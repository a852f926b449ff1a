"""Experiments as files: what is compared, the published figures, and the runs of the sweep."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import digits
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from muri.errors import UsageError
from muri.profiler.records import RESOURCES
from muri.simulator.model import Cluster, Run, Settings, Trace
from muri.simulator.run import check_policies
from muri.text import yaml_of
from muri_lab.experiments.workloads import submitted_at_zero, with_bottlenecks

Metric = Literal[
    "avg_jct_s",
    "median_jct_s",
    "p99_jct_s",
    "makespan_s",
    "queue_length_mean",
    "blocking_index_mean",
    "storage_busy",
    "cpu_busy",
    "gpu_busy",
    "network_busy",
]
"""A figure of a run; `…_busy` are the busy shares of the resources, means over time."""
_Share = Annotated[float, Field(ge=0, le=1)]
_SUFFIX: Final = ".yaml"
_PREFIX: Final = "muri_"


class ExperimentError(UsageError):
    """There is no such experiment, or its file is wrong."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Variant(_Strict):
    """One line of an experiment."""

    name: str  # Its name on the page
    policy: str  # Name of the policy
    options: dict[str, Any] = {}  # Its options
    durations_known: bool = True  # Whether it sees remaining times
    profile_noise: _Share = 0.0  # n_p of the stage times it sees
    bottleneck_types: Annotated[int, Field(ge=1, le=len(RESOURCES))] | None = None  # of the trained models
    over: str | None = None  # Its figures are divided by those of this variant; None: of `relative_to`
    model: Literal["default", "reference"] | None = None  # Instead of the experiment's


class Published(_Strict):
    """Published figures of one variant, in the unit of its cells: as ratios where it is divided by another one."""

    variant: str  # Its name
    trace: str  # Name of the trace that they are of; they are shown beside ours of the same trace only
    at_most: bool = False  # Whether the figures are upper bounds
    avg_jct_s: float | None = None
    median_jct_s: float | None = None
    p99_jct_s: float | None = None
    makespan_s: float | None = None
    queue_length_mean: float | None = None
    blocking_index_mean: float | None = None
    storage_busy: float | None = None
    cpu_busy: float | None = None
    gpu_busy: float | None = None
    network_busy: float | None = None

    def figure(self, metric: Metric) -> float | None:
        """The published figure of a metric, if there is one."""
        value: float | None = getattr(self, metric)
        return value


class PublishedRange(_Strict):
    """Least and largest ratio of a metric, over all traces and all variants but one."""

    metric: Metric  # The metric
    over: str  # The figures of the other variants are divided by those of this one
    low: float  # The least published ratio
    high: float  # The largest


class Experiment(_Strict):
    """A figure or table of a paper: traces × variants."""

    figure: str  # "Figure 9"
    title: str  # One line
    about: str = ""  # A paragraph on what is compared and where the published figures come from
    model: Literal["default", "reference"]  # As in `Settings`
    nodes: Annotated[int, Field(ge=1)] = 8  # Of the cluster
    gpus_per_node: Annotated[int, Field(ge=1)] = 8  # Of each node
    interval_s: Annotated[float, Field(ge=0)] = 0.0  # as in `Settings`; the reference model plans at every event
    any_user: bool = True  # As in `Settings`; the papers' jobs share with those of any user
    traces: Annotated[tuple[str, ...], Field(min_length=1)]  # names without folder and ending
    submit_at_zero: Annotated[tuple[bool, ...], Field(min_length=1)] = (False,)  # else as in the trace
    variants: Annotated[tuple[Variant, ...], Field(min_length=1)]  # What is compared
    metrics: Annotated[tuple[Metric, ...], Field(min_length=1)]  # What the page shows
    relative_to: str | None = None  # The figures of the other variants are divided by those of this one
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0,)  # figures are means over them
    published: tuple[Published, ...] = ()  # Figures of the publication
    published_runs: bool = False  # Whether the public simulator's published figures are shown as well
    ranges: tuple[PublishedRange, ...] = ()  # Published ranges over all traces
    curves: bool = False  # Whether what happens over time is drawn

    @model_validator(mode="after")
    def _names_fit(self) -> "Experiment":
        names = [variant.name for variant in self.variants]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"variants: {', '.join(repeated)} is there more than once")
        bases = {self.relative_to, *(one.over for one in self.variants), *(one.over for one in self.ranges)}
        used = {one.variant for one in self.published} | {name for name in bases if name}
        unknown = sorted(used - set(names))
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is not a variant; variants are: {', '.join(names)}")
        return self

    def base_of(self, variant: Variant) -> str | None:
        """The variant whose figures divide those of this one, if any."""
        return variant.over or self.relative_to


def experiment_names() -> tuple[str, ...]:
    """The experiments that come with the simulator."""
    names = (item.name.removesuffix(_SUFFIX) for item in _folder().iterdir() if item.name.endswith(_SUFFIX))
    return tuple(sorted(names, key=lambda name: (name.rstrip(digits), int("0" + name[len(name.rstrip(digits)) :]))))


def load_experiment(name: str) -> Experiment:
    """Read an experiment."""
    if name in experiment_names():
        return parse_experiment((_folder() / (name + _SUFFIX)).read_text(encoding="utf-8"), name)
    path = Path(name)
    if path.suffix not in {".yaml", ".yml"}:
        raise ExperimentError(
            f"unknown experiment {name!r}; valid are: {', '.join(experiment_names())}, or a file of your own (.yaml)"
        )
    try:
        return parse_experiment(path.read_text(encoding="utf-8"), name)
    except OSError as error:
        raise ExperimentError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ExperimentError(f"{path}: not UTF-8 text") from error


def parse_experiment(text: str, source: str) -> Experiment:
    """Read an experiment from YAML."""
    try:
        document = yaml_of(text, source)
    except ValueError as error:
        raise ExperimentError(f"{source}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise ExperimentError(f"{source}: must be a mapping with the keys {', '.join(Experiment.model_fields)}")
    try:
        return Experiment.model_validate(document)
    except ValidationError as error:
        problems = "\n".join(f"  {_where(one['loc'])}: {one['msg']}" for one in error.errors())
        raise ExperimentError(f"{source}: wrong experiment\n{problems}") from error


def published_runs() -> dict[tuple[str, str], Published]:
    """Figures behind Figures 9 to 11 of the Muri paper, as its public repository has them, by trace and policy."""
    with (_folder() / "published.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    return {
        (row["trace"], row["policy"]): Published(
            variant=row["policy"],
            trace=row["trace"],
            avg_jct_s=float(row["avg_jct_s"]),
            makespan_s=float(row["makespan_s"]),
            p99_jct_s=float(row["p99_jct_s"]) if row["p99_jct_s"] else None,
        )
        for row in rows
    }


def _where(location: tuple[int | str, ...]) -> str:
    """A key's path: `variants[2].policy`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.lstrip(".") or "file"


def _folder() -> Traversable:
    return files("muri_lab.experiments")


@dataclass(frozen=True, slots=True)
class Found:
    """The traces of an experiment that lie in a folder."""

    files: dict[str, Path]  # Path by the name that the experiment uses
    missing: tuple[str, ...] = ()  # Names without a file


def find_traces(experiment: Experiment, folder: Path | None, given: Sequence[Path]) -> Found:
    """The traces to run on: those given by path, or those in a folder under the experiment's names."""
    if given:
        return Found({trace_name(path.stem): path for path in given})
    wanted = ", ".join(f"{name}.csv or {_PREFIX}{name}.csv" for name in experiment.traces)
    if folder is None:
        raise ExperimentError(f"--experiment needs --traces DIR with {wanted}; or name trace files")
    try:
        stems = {path.stem: path for path in sorted(folder.iterdir()) if path.is_file()}
    except OSError as error:
        raise ExperimentError(f"--traces {folder}: {error.strerror}") from error
    files = {name: stems.get(name, stems.get(_PREFIX + name)) for name in experiment.traces}
    found = {name: path for name, path in files.items() if path is not None}
    if not found:
        raise ExperimentError(f"--traces {folder}: none of {wanted} is there; or name trace files")
    return Found(found, tuple(name for name, path in files.items() if path is None))


def trace_name(stem: str) -> str:
    """The name under which figures of a trace are published."""
    return stem.removeprefix(_PREFIX)


def runs_of_experiment(experiment: Experiment, traces: Iterable[Trace]) -> tuple[Run, ...]:
    """Traces × submission × variants × seeds, in this order."""
    for variant in experiment.variants:
        try:
            check_policies(variant.model or experiment.model, {variant.policy: variant.options})
        except UsageError as error:
            raise ExperimentError(f"{experiment.figure}: variant {variant.name}: {error}") from error
    return tuple(
        _run(experiment, variant, submitted, seed)
        for trace in traces
        for at_zero in experiment.submit_at_zero
        for submitted in [submitted_at_zero(trace) if at_zero else trace]
        for variant in experiment.variants
        for seed in experiment.seeds
    )


def _run(experiment: Experiment, variant: Variant, trace: Trace, seed: int) -> Run:
    model = variant.model or experiment.model
    settings = Settings(
        any_user=experiment.any_user,
        model=model,
        interval_s=0.0 if model == "reference" else experiment.interval_s,
        profile_noise=variant.profile_noise,
        durations_known=variant.durations_known,
        seed=seed,
    )
    kinds = variant.bottleneck_types
    return Run(
        label=variant.name,
        trace=trace if kinds is None else with_bottlenecks(trace, kinds, seed),
        policy=variant.policy,
        cluster=Cluster(experiment.nodes, experiment.gpus_per_node),
        settings=settings,
        options=variant.options,
    )
