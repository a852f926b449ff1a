"""Ours beside the published figures, cell by cell."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from muri.simulator.experiment import Experiment, Metric, Published, Variant, published_runs
from muri.simulator.summary import PolicySummary, TraceSummary


@dataclass(frozen=True, slots=True)
class Comparison:
    """One cell of an experiment.

    Attributes:
        trace: Name of the trace; with a prime where all jobs are submitted at its start.
        variant: Name of the variant.
        metric: Name of the metric.
        ours: Seconds, or the ratio to another variant where the experiment says so; None: it has no jobs.
        published: The published figure in the same unit; None: there is none.
        at_most: Whether the published figure is an upper bound.
        ratio: Ours over the published one.
    """

    trace: str
    variant: str
    metric: Metric
    ours: float | None
    published: float | None = None
    at_most: bool = False

    @property
    def ratio(self) -> float | None:
        """Ours over the published figure."""
        return self.ours / self.published if self.ours is not None and self.published else None

    def as_json(self) -> dict[str, Any]:
        """All of it as a mapping."""
        return {**asdict(self), "ratio": self.ratio}


def compare(experiment: Experiment, summaries: Sequence[TraceSummary]) -> tuple[Comparison, ...]:
    """All cells: traces × variants × metrics, in this order."""
    return tuple(_cells(experiment, summaries))


def _cells(experiment: Experiment, summaries: Sequence[TraceSummary]) -> Iterator[Comparison]:
    published = _Published(experiment)
    for summary in summaries:
        of_name = {policy.label: policy for policy in summary.policies}
        base = of_name[experiment.relative_to] if experiment.relative_to else None
        for variant in experiment.variants:
            for metric in experiment.metrics:
                ours = _ours(of_name[variant.name], base, metric)
                figure, at_most = published.find(summary.name, variant, metric)
                yield Comparison(summary.name, variant.name, metric, ours, figure, at_most)


def _ours(policy: PolicySummary, base: PolicySummary | None, metric: Metric) -> float | None:
    own: float = policy.figures[metric]
    if base is None:
        return own
    return own / base.figures[metric] if base.figures[metric] else None


class _Published:
    """Looks up what is published, by the experiment itself or of the public simulator's runs."""

    def __init__(self, experiment: Experiment) -> None:
        self._own = {(one.trace, one.variant): one for one in experiment.published}
        self._runs: dict[tuple[str, str], Published] = published_runs() if experiment.published_runs else {}

    def find(self, trace: str, variant: Variant, metric: Metric) -> tuple[float | None, bool]:
        """The figure, and whether it is an upper bound."""
        places = (self._own.get((trace, variant.name)), self._own.get((None, variant.name)))
        for place in (*places, self._run(trace, variant)):
            if place is not None and place.figure(metric) is not None:
                return place.figure(metric), place.at_most
        return None, False

    def _run(self, trace: str, variant: Variant) -> Published | None:
        changed = variant.options or variant.profile_noise or variant.bottleneck_types
        return None if changed else self._runs.get((trace, variant.policy))
