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
from muri.foreign import yaml_of
from muri.profiler.records import RESOURCES
from muri.simulator.model import Cluster, Settings, Trace
from muri.simulator.run import check_policies
from muri.simulator.runs import Run
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
    """One line of an experiment.

    Attributes:
        name: Its name on the page.
        policy: Name of the policy.
        options: Its options.
        durations_known: Whether it sees remaining times.
        profile_noise: n_p of the stage times it sees.
        bottleneck_types: Jobs train models of this many kinds of bottleneck; None: their own.
        over: The variant by whose figures its own are divided; None: the experiment's `relative_to`.
        model: Instead of the experiment's.
    """

    name: str
    policy: str
    options: dict[str, Any] = {}
    durations_known: bool = True
    profile_noise: _Share = 0.0
    bottleneck_types: Annotated[int, Field(ge=1, le=len(RESOURCES))] | None = None
    over: str | None = None
    model: Literal["default", "reference"] | None = None


class Published(_Strict):
    """Published figures of one variant, in the unit of its cells: as ratios where it is divided by another one.

    Attributes:
        variant: Its name.
        trace: Name of the trace that they are of; they are shown beside ours of the same trace only.
        at_most: Whether the figures are upper bounds.
    """

    variant: str
    trace: str
    at_most: bool = False
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
    """Between what the ratios of a metric lie, over all traces and all variants but one.

    Attributes:
        metric: The metric.
        over: The variant by whose figures those of the others are divided.
        low: The least published ratio.
        high: The largest.
    """

    metric: Metric
    over: str
    low: float
    high: float


class Experiment(_Strict):
    """A figure or table of a paper: traces × variants.

    Attributes:
        figure: "Figure 9".
        title: One line.
        about: A paragraph on what is compared and where the published figures come from.
        model: As in `Settings`.
        nodes: Of the cluster.
        gpus_per_node: Of each node.
        interval_s: As in `Settings`; variants under the reference model plan at every event.
        any_user: As in `Settings`; the papers' jobs share with those of any user.
        traces: Names of trace files, without folder and ending; "muri_" may go before them.
        submit_at_zero: Whether jobs are submitted as the trace says (false), all at once (true), or both.
        variants: What is compared.
        metrics: What the page shows.
        relative_to: Figures are divided by those of this variant; None: only those of variants with `over`.
        seeds: Of the noise and of drawn models; figures are means over them.
        published: Figures of the publication.
        published_runs: Whether the public simulator's published figures are shown as well.
        ranges: Published ranges over all traces.
        curves: Whether what happens over time is drawn.
    """

    figure: str
    title: str
    about: str = ""
    model: Literal["default", "reference"]
    nodes: Annotated[int, Field(ge=1)] = 8
    gpus_per_node: Annotated[int, Field(ge=1)] = 8
    interval_s: Annotated[float, Field(ge=0)] = 0.0
    any_user: bool = True
    traces: Annotated[tuple[str, ...], Field(min_length=1)]
    submit_at_zero: Annotated[tuple[bool, ...], Field(min_length=1)] = (False,)
    variants: Annotated[tuple[Variant, ...], Field(min_length=1)]
    metrics: Annotated[tuple[Metric, ...], Field(min_length=1)]
    relative_to: str | None = None
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0,)
    published: tuple[Published, ...] = ()
    published_runs: bool = False
    ranges: tuple[PublishedRange, ...] = ()
    curves: bool = False

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
        """The variant by whose figures those of this one are divided, if any."""
        return variant.over or self.relative_to


def experiment_names() -> tuple[str, ...]:
    """The experiments that come with the simulator."""
    names = (_name(item) for item in _folder().iterdir() if item.name.endswith(_SUFFIX))
    return tuple(sorted(names, key=lambda name: (name.rstrip(digits), int("0" + name[len(name.rstrip(digits)) :]))))


def load_experiment(name: str) -> Experiment:
    """Read an experiment.

    Args:
        name: One of `experiment_names`, or the path of a YAML file.

    Raises:
        ExperimentError: There is no such experiment, or the file is wrong; names the file and the key.
    """
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
    """Read an experiment from YAML.

    Args:
        text: The YAML.
        source: What errors call it.

    Raises:
        ExperimentError: Names every key that is wrong.
    """
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


def _name(item: Traversable) -> str:
    return item.name.removesuffix(_SUFFIX)


@dataclass(frozen=True, slots=True)
class Found:
    """The traces of an experiment that lie in a folder.

    Attributes:
        files: Path by the name that the experiment uses.
        missing: Names without a file.
    """

    files: dict[str, Path]
    missing: tuple[str, ...] = ()


def find_traces(experiment: Experiment, folder: Path | None, given: Sequence[Path]) -> Found:
    """The traces to run on: those given by path, or those in a folder under the experiment's names.

    Raises:
        ExperimentError: No trace was given or found; lists the names that were looked for.
    """
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
    """Traces × submission × variants × seeds, in this order.

    Raises:
        UsageError: A variant's policy or options are unknown; names the variant.
    """
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
