"""The question that grouping answers, and its answer: jobs, kinds of jobs, what groups are worth and which may form."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from muri.policies.options import MAX_GROUP_SIZE, PolicyOptions
from muri.policies.speed.model import Floats, Indices, Shape, SpeedModel
from muri.policies.types import Certificate

Members = tuple[int, ...]
"""Indices of a group's members into the problem's jobs, ascending: the most urgent first."""

_GAIN = 1e-9
"""Gain in total speed below which sharing is only a rounding error."""


@dataclass(frozen=True, slots=True)
class BucketProblem:
    """Jobs that may share GPUs with each other, and how many groups of them there is room for.

    Attributes:
        shapes: What sharing depends on, for each job; the most urgent job first.
        worth: What a second of each job's full-speed progress is worth; all 1 unless the objective is "jct".
        gpu_count: GPUs of each job, the same for all.
        slots: How many groups (of any size, single jobs too) can run at once.
        memory_limit_gib: GPU memory that a group may use; infinite when unknown.
        largest: Largest group that each job may be in; empty: no job sets a limit.
    """

    shapes: tuple[Shape, ...]
    worth: tuple[float, ...]
    gpu_count: int
    slots: int
    memory_limit_gib: float = float("inf")
    largest: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BucketGroups:
    """Who shares with whom.

    Attributes:
        groups: At most `slots` of them, single jobs among them, by their most urgent member.
            No job is in two. The first `slots` jobs of the problem are all in one.
        left: Jobs that are in no group, ascending.
        certificate: Value of the groups under the objective, and the proven bound.
    """

    groups: tuple[Members, ...]
    left: Members
    certificate: Certificate


@dataclass(frozen=True, slots=True)
class Kinds:
    """The jobs of a problem by kind: equal shape, equal worth and an equal limit.

    Attributes:
        shapes: Shape of each kind; kinds are sorted, so the order of jobs decides nothing.
        worth: Worth of each kind.
        largest: Largest group that jobs of each kind may be in.
        jobs: Indices of the jobs of each kind, the most urgent first.
        urgent: How many of them are among the problem's first `slots` jobs, which must not be left out.
    """

    shapes: tuple[Shape, ...]
    worth: tuple[float, ...]
    largest: tuple[int, ...]
    jobs: tuple[tuple[int, ...], ...]
    urgent: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many jobs there are of each kind."""
        return tuple(len(jobs) for jobs in self.jobs)


def kinds_of(problem: BucketProblem) -> Kinds:
    """Sort the jobs of a problem into kinds."""
    members: dict[tuple[Shape, float, int], list[int]] = {}
    limits = problem.largest or (MAX_GROUP_SIZE,) * len(problem.shapes)
    for index, key in enumerate(zip(problem.shapes, problem.worth, limits, strict=True)):
        members.setdefault(key, []).append(index)
    ordered = sorted(members)
    jobs = tuple(tuple(members[key]) for key in ordered)
    return Kinds(
        shapes=tuple(shape for shape, _, _ in ordered),
        worth=tuple(worth for _, worth, _ in ordered),
        largest=tuple(size for _, _, size in ordered),
        jobs=jobs,
        urgent=tuple(sum(index < problem.slots for index in indices) for indices in jobs),
    )


def coefficients(shapes: Sequence[Shape], worth: Sequence[float], objective: str) -> Floats:
    """What a second at full speed of each job adds to the objective.

    All objectives are sums over the members of such a coefficient times the member's speed, so a bound on the speeds
    is a bound on the objective.

    Args:
        shapes: One for each job or type.
        worth: Weight of each under the objective "jct": the inverse of its remaining (or attained) service,
            as in Smith's rule for weighted completion times.
        objective: "efficiency" (γ, Muri Eq. 4: the share of time that the job keeps a resource busy,
            averaged over resources), "throughput" (1 each) or "jct".

    Returns:
        Array with a figure for each job.
    """
    if objective == "throughput":
        return np.ones(len(shapes))
    if objective == "jct":
        return np.asarray(worth, dtype=np.float64)
    return np.array([sum(shape.stage_s) / (len(shape.stage_s) * shape.iteration_s) for shape in shapes])


class Appraiser:
    """Evaluates groups; kinds of jobs are indices.

    Args:
        shapes: What sharing depends on, for each kind.
        worth: What a second of each kind's full-speed progress is worth.
        largest: Largest group that jobs of each kind may be in.
        options: Objective and margin.
        model: How fast members are.
        memory_limit_gib: GPU memory that a group may use.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        worth: Sequence[float],
        largest: Sequence[int],
        options: PolicyOptions,
        model: SpeedModel,
        memory_limit_gib: float,
    ) -> None:
        self.coefficient = coefficients(shapes, worth, options.objective)
        self._shapes = shapes
        self._options = options
        self._model = model
        self._memory_gib = np.array([shape.gpu_mem_gib for shape in shapes])
        self._memory_limit_gib = memory_limit_gib
        self._largest = np.array(largest, dtype=np.intp)
        self._limits_size = bool((self._largest < options.max_group_size).any())

    @property
    def limits(self) -> bool:
        """Whether there is any group that could be too large."""
        return self._limits_size or bool(np.isfinite(self._memory_limit_gib))

    def fits(self, groups: Indices) -> NDArray[np.bool_]:
        """Which groups fit the GPU's memory and are no larger than any member may be in."""
        fits = np.asarray(self._memory_gib[groups].sum(axis=1) <= self._memory_limit_gib)
        if self._limits_size:
            fits &= self._largest[groups].min(axis=1) >= groups.shape[1]
        return fits

    def appraise(self, groups: Indices) -> tuple[Floats, Floats]:
        """Value under the objective, and total speed, of each of n groups; γ is the speed model's own."""
        evaluation = self._model.evaluate(self._shapes, groups)
        total_speed = evaluation.speed.sum(axis=1)
        if self._options.objective == "efficiency":
            return evaluation.efficiency, total_speed
        return (evaluation.speed * self.coefficient[groups]).sum(axis=1), total_speed

    def pays(self, total_speed: Floats, alone: Floats | float = 1.0) -> NDArray[np.bool_]:
        """Which groups do more work than what would run instead, by the factor asked for.

        Args:
            total_speed: Sum of the members' speeds.
            alone: Total speed of what would run instead.
        """
        return np.asarray(total_speed > np.asarray(alone) * self._options.min_speedup + _GAIN)
