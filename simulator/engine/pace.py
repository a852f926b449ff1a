"""The true speeds of jobs that share GPUs, whatever the policy that grouped them assumes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import combinations_with_replacement
from typing import Final, Protocol, runtime_checkable

import numpy as np

from muri.policies.lockstep import Lockstep, period_s
from muri.policies.siblings.shares import shape_with, throughput_ratio
from muri.policies.speed import Shape, SpeedModel, shape_of
from muri.policies.traits import Demand, InterferenceTable, PairSpeed, Sensitivity, derived_sensitivity
from muri.policies.types import Policy
from muri.profiler.interference import estimated_ratio
from muri.profiler.records import RESOURCES, StageProfile
from muri.simulator.engine.jobs import LiveJob, Unit
from muri.simulator.model import Cluster, SimulationError, TraceJob
from muri.simulator.traces.models import synergy_sensitivity

_CACHED = 65_536

_MOST_MODELS: Final = 1_000
"""Half a million pairs, a few seconds of work. A trace with more models usually names each job's own."""


class Pace(Protocol):
    """True speeds of the members of a group."""

    def speeds(self, members: tuple[Shape, ...]) -> tuple[float, ...]:
        """Speed of each, 1 = as fast as alone; the members are in the ordering in which they interleave."""
        ...

    def order(self, planned: Sequence[Shape]) -> tuple[int, ...]:
        """The members' ordering after one has left, chosen from the profiles that the policy sees."""
        ...


@runtime_checkable
class PacedPolicy(Protocol):
    """A policy whose jobs share resources in a way of its own."""

    @property
    def pace(self) -> Pace:
        """True speeds of the members of its groups."""
        ...


class _LockstepPace:
    """One iteration per period of the planned ordering, which need not be the best if the profiles were wrong."""

    def __init__(self, model: Lockstep) -> None:
        self._model = model

    def speeds(self, members: tuple[Shape, ...]) -> tuple[float, ...]:
        longest_s = max(shape.iteration_s for shape in members)
        period = max(longest_s, period_s([shape.stage_s for shape in members]))
        return tuple(shape.iteration_s / period for shape in members)

    def order(self, planned: Sequence[Shape]) -> tuple[int, ...]:
        return self._model.order(planned)


class _ModelPace:
    """Speeds of a model without an ordering."""

    def __init__(self, model: SpeedModel) -> None:
        self._model = model

    def speeds(self, members: tuple[Shape, ...]) -> tuple[float, ...]:
        answer = self._model.evaluate(members, np.arange(len(members), dtype=np.intp)[None])
        return tuple(answer.speed[0].tolist())

    def order(self, planned: Sequence[Shape]) -> tuple[int, ...]:
        return self._model.order(planned)


def pace_of(policy: Policy, model: SpeedModel) -> Pace:
    """How the runtime shares out resources under a policy."""
    if isinstance(policy, PacedPolicy):
        return policy.pace
    return _LockstepPace(model) if isinstance(model, Lockstep) else _ModelPace(model)


class Pairs:
    """Speeds of every pair of a trace's models."""

    def __init__(self, measured: Iterable[PairSpeed], jobs: Sequence[TraceJob]) -> None:
        self._measured = InterferenceTable(tuple(measured))
        self._jobs = jobs

    @cached_property
    def table(self) -> InterferenceTable:
        """The measured pairs, and estimates of all others.

        Estimates are for two processes that share a GPU without turns, by queueing theory
        (`muri.profiler.interference`), from the profile of each model's first job by submit time.

        Raises:
            SimulationError: There are too many models.
        """
        known = self._measured
        profiles: dict[str, StageProfile] = {}
        for job in sorted(self._jobs, key=lambda job: (job.submit_s, job.job_id)):
            profiles.setdefault(job.key.model, job.profile)
        if len(profiles) > _MOST_MODELS:
            raise SimulationError(
                f"the trace has {len(profiles)} models; a policy that shares GPUs without turns needs the speeds of "
                f"all pairs, and can be simulated with at most {_MOST_MODELS} models; call jobs of one script alike"
            )
        estimated = (
            PairSpeed(model_a, model_b, *(1 / estimated_ratio(profiles[model_a], profiles[model_b]),) * 2)
            for model_a, model_b in combinations_with_replacement(sorted(profiles), 2)
            if known.speeds(model_a, model_b) is None
        )
        return InterferenceTable((*known.rows, *estimated))

    def speed(self, model: str, others: Iterable[str]) -> float:
        """Speed of a model on a GPU with others, 1 = as fast as alone: the product of its pair speeds."""
        speed = 1.0
        for other in others:
            found = self.table.speeds(model, other)
            assert found is not None
            speed *= found[0]
        return speed


def sensitivities_of(jobs: Sequence[TraceJob], cluster: Cluster, fair: Demand) -> dict[int, Sensitivity | None]:
    """The sensitivity of every job, by id; equal ones are one object. None where CPUs and memory are unlimited."""
    if fair == (math.inf, math.inf):
        return {job.job_id: None for job in jobs}
    derived: dict[StageProfile, Sensitivity | None] = {}
    found: dict[int, Sensitivity | None] = {}
    for job in jobs:
        known = job.sensitivity or synergy_sensitivity(job.key.model)
        if known is None:
            if job.profile not in derived:
                on_one_node = min(job.gpu_count, cluster.gpus_per_node)
                derived[job.profile] = derived_sensitivity(job.profile, fair, cluster.cpus_per_node / on_one_node)
            known = derived[job.profile]
        found[job.job_id] = known
    return found


class Speeds:
    """True speeds of units; each combination of profiles is computed once."""

    def __init__(
        self,
        pace: Pace,
        jobs: Sequence[TraceJob],
        sensitivities: Mapping[int, Sensitivity | None],
        fair: Demand,
        pairs: Pairs,
    ) -> None:
        self._pace = pace
        self._pairs = pairs
        self.sensitivities = sensitivities
        self._fair = fair
        numbers: dict[tuple[Shape, int], int] = {}
        kept: dict[int, Sensitivity | None] = {}
        self.of_job: dict[int, int] = {}
        for job in jobs:
            sensitivity = sensitivities[job.job_id]
            kept[id(sensitivity)] = sensitivity  # equal ones are one object
            key = (shape_of(job.profile), id(sensitivity))
            self.of_job[job.job_id] = numbers.setdefault(key, len(numbers))
        self._shapes = tuple(shape for shape, _ in numbers)
        self._sensitivities = tuple(kept[identity] for _, identity in numbers)
        self.used = tuple(_used(shape) for shape in self._shapes)
        """Share of the time alone during which each resource is used, by number of the shape."""
        self._cached = lru_cache(maxsize=_CACHED)(self._compute)

    def of(self, unit: Unit) -> tuple[float, ...]:
        """Speed of each member."""
        members = unit.members
        if unit.given is None and len(members) == 1:
            return (1.0,)
        return self._cached(tuple([live.shape for live in members]), unit.given, unit.seat.mode)

    def reorder(self, members: Sequence[LiveJob]) -> list[LiveJob]:
        """The members in their ordering after one has left."""
        if len(members) == 1:
            return list(members)
        return [members[index] for index in self._pace.order([shape_of(live.planned) for live in members])]

    def _compute(self, numbers: tuple[int, ...], given: Demand | None, mode: str) -> tuple[float, ...]:
        if given is None:
            return self._together(tuple([self._shapes[number] for number in numbers]), mode)
        traits = [(self._shapes[number], self._sensitivities[number]) for number in numbers]
        speeds = self._together(tuple([shape_with(*trait, given, self._fair) for trait in traits]), mode)
        alone = [throughput_ratio(sensitivity, given, self._fair) for _, sensitivity in traits]
        return tuple([speed * ratio for speed, ratio in zip(speeds, alone, strict=True)])

    def _together(self, shapes: tuple[Shape, ...], mode: str) -> tuple[float, ...]:
        if len(shapes) == 1:
            return (1.0,)
        if mode == "plain":
            return tuple(
                [self._pairs.speed(shape.model, _models(shapes, but=index)) for index, shape in enumerate(shapes)]
            )
        speeds = self._pace.speeds(shapes)
        if not all(0.0 <= speed <= 1.0 + 1e-9 for speed in speeds):
            raise SimulationError(f"the speed model gives speeds {speeds}; they must be 0 to 1")
        return speeds


def _models(shapes: Sequence[Shape], but: int) -> list[str]:
    return [shape.model for index, shape in enumerate(shapes) if index != but]


def _used(shape: Shape) -> tuple[float, ...]:
    assert len(shape.stage_s) == len(RESOURCES)
    return tuple(min(1.0, stage_s / shape.iteration_s) for stage_s in shape.stage_s)
