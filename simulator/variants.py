"""An experiment and the traces at hand, as runs of a sweep."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from muri.errors import UsageError
from muri.simulator.experiment import Experiment, ExperimentError, Variant
from muri.simulator.model import Cluster, Settings, Trace, TraceJob
from muri.simulator.request import check_policies
from muri.simulator.sweep import Run

_PREFIX: Final = "muri_"

TABLE_1: Final = (
    ("shufflenet", (0.60, 0.18, 0.06, 0.02)),
    ("a2c", (0.0, 0.91, 0.03, 0.002)),
    ("gpt2", (0.0006, 0.0003, 0.85, 0.28)),
    ("vgg19", (0.24, 0.04, 0.26, 0.41)),
)
"""A model for each bottleneck, with the shares of an iteration that it loads, preprocesses, propagates and synchronizes
(Muri, Table 1)."""


@dataclass(frozen=True, slots=True)
class Found:
    """The traces of an experiment that lie in a folder.

    Attributes:
        files: Path by the name that the experiment uses.
        missing: Names that no file was found for.
    """

    files: dict[str, Path]
    missing: tuple[str, ...] = ()


def find_traces(experiment: Experiment, folder: Path | None, given: Sequence[Path]) -> Found:
    """The traces to run on: those given by path, or those of the experiment's names in a folder.

    Raises:
        ExperimentError: Nothing was given or found; says which names are looked for.
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
            check_policies(experiment.model, {variant.policy: variant.options})
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


def submitted_at_zero(trace: Trace) -> Trace:
    """The trace with every job submitted at its start; the papers put a prime behind its name."""
    jobs = tuple(replace(job, submit_s=0.0) for job in sorted(trace.jobs, key=lambda job: job.job_id))
    return replace(trace, name=f"{trace.name}'", jobs=jobs)


def with_bottlenecks(trace: Trace, kinds: int) -> Trace:
    """The trace with jobs of the first so many kinds of `TABLE_1`, in turn; lengths stay as they are."""
    jobs = tuple(_of_kind(job, *TABLE_1[index % kinds]) for index, job in enumerate(trace.jobs))
    return replace(trace, jobs=jobs)


def _of_kind(job: TraceJob, model: str, shares: tuple[float, float, float, float]) -> TraceJob:
    load_s, preprocess_s, propagate_s, synchronize_s = (share * job.profile.iteration_s for share in shares)
    profile = replace(
        job.profile,
        key=replace(job.profile.key, model=model),
        load_s=load_s,
        preprocess_s=preprocess_s,
        propagate_s=propagate_s,
        synchronize_s=synchronize_s,
    )
    return replace(job, profile=profile)


def _run(experiment: Experiment, variant: Variant, trace: Trace, seed: int) -> Run:
    settings = Settings(
        model=experiment.model,
        interval_s=experiment.interval_s,
        profile_noise=variant.profile_noise,
        durations_known=variant.durations_known,
        seed=seed,
    )
    kinds = variant.bottleneck_types
    return Run(
        label=variant.name,
        trace=trace if kinds is None else with_bottlenecks(trace, kinds),
        policy=variant.policy,
        cluster=Cluster(experiment.nodes, experiment.gpus_per_node),
        settings=settings,
        options=variant.options,
    )
