"""A grouping problem and its answer: jobs, kinds of jobs, the value of groups, and which groups may form."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from muri.policies.options import MAX_GROUP_SIZE, PolicyOptions
from muri.policies.speed import Floats, Indices, Shape, SpeedModel, evaluate
from muri.policies.types import Certificate

Members = tuple[int, ...]  # Indices of a group's members into the problem's jobs, ascending: the most urgent first
_GAIN = 1e-9  # Gain in total speed below which sharing is only a rounding error


class Kind(NamedTuple):
    """Jobs that no grouping needs to tell apart.

    Attributes:
        shape: The figures that sharing depends on.
        worth: Worth of a second of a job's full-speed progress; 1 unless the objective is "jct".
        largest: Largest group that it may be in.
        min_speed: Minimum speed in a group.
        guess: Number of its model, from 1, where its shape is only an estimate; else 0.
    """

    shape: Shape
    worth: float = 1.0
    largest: int = MAX_GROUP_SIZE
    min_speed: float = 0.0
    guess: int = 0


@dataclass(frozen=True, slots=True)
class OpenUnit:
    """One running job or group that waiting jobs may join.

    Attributes:
        members: Kinds of its members.
        memory_limit_gib: GPU memory for all members together; infinite when unknown.
        spare_mem_gib: Host memory for new members together; infinite when unknown.
        closed_to: Indices of the problem's jobs that must not join it.
    """

    members: tuple[Kind, ...]
    memory_limit_gib: float = float("inf")
    spare_mem_gib: float = float("inf")
    closed_to: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class BucketProblem:
    """Jobs that may share GPUs with each other, the number of groups that fit, and open units.

    Attributes:
        jobs: The kind of each job; the most urgent job first.
        gpu_count: GPUs of each job, the same for all.
        slots: Number of new groups (of any size, single jobs too) that can run at once.
        memory_limit_gib: GPU memory of a new group; infinite when unknown.
        open_units: Running units that take new members.
        mem_gib: Host memory of each job; empty: none needs any.
    """

    jobs: tuple[Kind, ...]
    gpu_count: int
    slots: int
    memory_limit_gib: float = float("inf")
    open_units: tuple[OpenUnit, ...] = ()
    mem_gib: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class BucketGroups:
    """The groups of a bucket.

    Attributes:
        groups: At most `slots` disjoint groups, single jobs among them, by their most urgent member. The first `slots`
            jobs of the problem are all in one, or join an open unit.
        left: Jobs that are in no group, ascending.
        certificate: Value of the groups under the objective, and the proven bound; of an open unit only the increase by
            new members.
        joins: For each open unit, the jobs that join it; empty where the problem has none.
    """

    groups: tuple[Members, ...]
    left: Members
    certificate: Certificate
    joins: tuple[Members, ...] = ()


@dataclass(frozen=True, slots=True)
class Kinds:
    """The jobs of a problem by kind.

    Attributes:
        kinds: The kinds, sorted, so that the order of jobs decides nothing.
        jobs: Indices of the jobs of each kind, the most urgent first.
        urgent: How many of them are among the problem's first `slots` jobs, which must not be left out.
    """

    kinds: tuple[Kind, ...]
    jobs: tuple[tuple[int, ...], ...]
    urgent: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of jobs of each kind."""
        return tuple(len(jobs) for jobs in self.jobs)


def kinds_of(problem: BucketProblem) -> Kinds:
    """Sort the jobs of a problem into kinds."""
    members: dict[Kind, list[int]] = {}
    for index, kind in enumerate(problem.jobs):
        members.setdefault(kind, []).append(index)
    ordered = sorted(members)
    return Kinds(
        kinds=tuple(ordered),
        jobs=tuple(tuple(members[kind]) for kind in ordered),
        urgent=tuple(sum(index < problem.slots for index in members[kind]) for kind in ordered),
    )


def coefficients(kinds: Sequence[Kind], objective: str) -> Floats:
    """Array: contribution of each kind's full speed to the objective.

    All objectives are sums over the members of such a coefficient times the member's speed: under "efficiency" (γ, Muri
    Eq. 4) the share of time that the job keeps a resource busy, averaged over resources, under "throughput" 1, under
    "jct" its worth.
    """
    if objective == "throughput":
        return np.ones(len(kinds))
    if objective == "jct":
        return np.array([kind.worth for kind in kinds], dtype=np.float64)
    shapes = [kind.shape for kind in kinds]
    return np.array([sum(shape.stage_s) / (len(shape.stage_s) * shape.iteration_s) for shape in shapes])


class Appraisal(NamedTuple):
    """Figures of some groups.

    Attributes:
        speed: Array (n, size): speeds of the members.
        value: Under the objective; γ is the speed model's own.
        total_speed: Sum of the members' speeds.
        keeps_promises: Whether no member falls below its minimum speed.
    """

    speed: Floats
    value: Floats
    total_speed: Floats
    keeps_promises: NDArray[np.bool_]


class Appraiser:
    """Evaluates groups under the options' objective; kinds of jobs are indices."""

    def __init__(
        self, kinds: Sequence[Kind], options: PolicyOptions, model: SpeedModel, memory_limit_gib: float
    ) -> None:
        self.coefficient = coefficients(kinds, options.objective)
        self._shapes = tuple(sorted({kind.shape for kind in kinds}))
        number = {shape: index for index, shape in enumerate(self._shapes)}
        self._shape_of = np.array([number[kind.shape] for kind in kinds], dtype=np.intp)
        self._options = options
        self._model = model
        self._memory_gib = np.array([kind.shape.gpu_mem_gib for kind in kinds])
        self._memory_limit_gib = memory_limit_gib
        self._largest = np.array([kind.largest for kind in kinds], dtype=np.intp)
        self._limits_size = bool((self._largest < options.max_group_size).any())
        self._min_speed = np.array([kind.min_speed for kind in kinds])
        self._promises = bool(self._min_speed.any())
        self._guess = np.array([kind.guess for kind in kinds], dtype=np.intp)
        self._limits = bool(self._limits_size or np.isfinite(memory_limit_gib) or self._guess.any())

    def memory_gib(self, groups: Indices) -> Floats:
        """GPU memory that each group needs."""
        return np.asarray(self._memory_gib[groups].sum(axis=1))

    def fits(self, groups: Indices) -> NDArray[np.bool_]:
        """Which groups fit the GPU's memory and members' limits, and have no two jobs of one unmeasured model."""
        if not self._limits:
            return np.ones(len(groups), dtype=np.bool_)
        fits = np.asarray(self._memory_gib[groups].sum(axis=1) <= self._memory_limit_gib)
        if self._limits_size:
            fits &= self._largest[groups].min(axis=1) >= groups.shape[1]
        if self._guess.any():
            models = np.sort(self._guess[groups], axis=1)
            fits &= ~((models[:, 1:] == models[:, :-1]) & (models[:, 1:] > 0)).any(axis=1)
        return fits

    def appraise(self, groups: Indices) -> Appraisal:
        """Evaluate n groups of one size."""
        evaluation = evaluate(self._model, self._shapes, self._shape_of[groups])
        total_speed = evaluation.speed.sum(axis=1)
        keeps: NDArray[np.bool_] = np.ones(len(groups), dtype=np.bool_)
        if self._promises and groups.shape[1] > 1:
            keeps = np.asarray((evaluation.speed >= self._min_speed[groups] - _GAIN).all(axis=1))
        if self._options.objective == "efficiency":
            return Appraisal(evaluation.speed, evaluation.efficiency, total_speed, keeps)
        value = (evaluation.speed * self.coefficient[groups]).sum(axis=1)
        return Appraisal(evaluation.speed, value, total_speed, keeps)

    def pays(self, appraisal: Appraisal, alone: Floats | float = 1.0) -> NDArray[np.bool_]:
        """Which groups keep minimum speeds and exceed the alternative's total speed by `min_speedup`."""
        more = appraisal.total_speed > np.asarray(alone) * self._options.min_speedup + _GAIN
        return np.asarray(more & appraisal.keeps_promises)
