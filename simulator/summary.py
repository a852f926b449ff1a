"""Outcomes of a sweep by trace and policy, averaged over the seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from muri.simulator.sweep import Outcome


@dataclass(frozen=True)
class PolicySummary:
    """One policy on one trace.

    Attributes:
        label: What tables call it.
        outcomes: One for each seed.
    """

    label: str
    outcomes: tuple[Outcome, ...]

    @cached_property
    def figures(self) -> Mapping[str, Any]:
        """The metrics by name, each the mean over the seeds."""
        means: Mapping[str, Any] = _mean([outcome.metrics.as_json() for outcome in self.outcomes])
        return means

    def as_json(self) -> dict[str, Any]:
        """The figures; with several seeds also those of each one."""
        document = dict(self.figures)
        if len(self.outcomes) > 1:
            document["seeds"] = {str(one.run.settings.seed): one.metrics.as_json() for one in self.outcomes}
        return document


@dataclass(frozen=True)
class TraceSummary:
    """All policies on one trace.

    Attributes:
        name: The trace's name.
        skipped_rows: Bad rows that were left out when it was read.
        policies: In the order in which they were asked for; the first is what others are compared with.
    """

    name: str
    skipped_rows: int
    policies: tuple[PolicySummary, ...]

    def speedup(self, policy: PolicySummary) -> float | None:
        """How many times shorter the average JCT is than under the first policy; None without jobs."""
        base, own = self.policies[0].figures["avg_jct_s"], policy.figures["avg_jct_s"]
        return base / own if own else None

    def as_json(self) -> dict[str, Any]:
        """What `muri simulate --json` prints for one trace."""
        policies = {policy.label: policy.as_json() for policy in self.policies}
        return {"policies": policies, "skipped_rows": self.skipped_rows}


def summarise(outcomes: Sequence[Outcome]) -> tuple[TraceSummary, ...]:
    """Sort outcomes by trace and policy, both in the order of their first appearance."""
    by_trace: dict[str, dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        by_trace.setdefault(outcome.run.trace.name, {}).setdefault(outcome.run.label, []).append(outcome)
    return tuple(
        TraceSummary(
            name,
            next(iter(by_label.values()))[0].run.trace.skipped_rows,
            tuple(PolicySummary(label, tuple(found)) for label, found in by_label.items()),
        )
        for name, by_label in by_trace.items()
    )


def document_of(summaries: Sequence[TraceSummary]) -> dict[str, Any]:
    """What `--json` prints: the plain form for one trace, by trace for several."""
    if len(summaries) == 1:
        return summaries[0].as_json()
    return {"traces": {summary.name: summary.as_json() for summary in summaries}}


def _mean(values: Sequence[Any]) -> Any:
    """The mean of numbers, of mappings key by key; whatever has no mean is taken from the first."""
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, Mapping):
        shared = [key for key in first if all(key in value for value in values)]
        return {key: _mean([value[key] for value in values]) for key in shared}
    if isinstance(first, bool) or not all(isinstance(value, int | float) for value in values):
        return first
    mean = fmean(values)
    return int(mean) if isinstance(first, int) and mean.is_integer() else mean
