"""Speeds of jobs that share GPUs: shapes, the protocol of a speed model, fair sharing, and measured pairs."""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import ClassVar, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from muri.errors import UsageError
from muri.policies.options import MAX_GROUP_SIZE
from muri.policies.traits import InterferenceTable
from muri.profiler.records import ProfileError, StageProfile

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
CHUNK = 8192  # Groups evaluated at once: few enough for the processor's caches, enough to make up for the calls


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """The figures of a profile that sharing depends on; equal shapes are computed once.

    Attributes:
        stage_s: Seconds per iteration on each resource.
        iteration_s: Seconds of an iteration alone.
        gpu_mem_gib: Peak GPU memory.
        model: Model name, by which measured interference is looked up.
    """

    stage_s: tuple[float, ...]
    iteration_s: float
    gpu_mem_gib: float = 0.0
    model: str = ""


def shape_of(profile: StageProfile) -> Shape:
    """The shape of a profile."""
    return Shape(profile.stage_s, profile.iteration_s, profile.gpu_mem_gib, profile.key.name)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A speed model's figures for n groups of p members each.

    Attributes:
        speed: Array (n, p): speed of each member, 1 = as fast as alone.
        efficiency: Array (n,): interleaving efficiency γ (Muri, Eq. 4), 0 to 1.
        period_s: Array (n,): seconds in which every member completes one iteration: T of Eq. 3, and no less than the
            longest iteration; NaN where the model has no period.
    """

    speed: Floats
    efficiency: Floats
    period_s: Floats


class SpeedModel(Hashable, Protocol):
    """How jobs slow each other down. Pure, deterministic and hashable."""

    @property
    def name(self) -> str:
        """The name by which options select the model."""
        ...

    def evaluate(self, shapes: Sequence[Shape], groups: Indices) -> Evaluation:
        """Evaluate many groups of equal size at once.

        Args:
            shapes: The distinct shapes.
            groups: Array (n, p) of indices into `shapes`; a row may name a shape several times.

        Raises:
            ProfileError: A shape has an impossible time.
            SpeedModelError: Groups or shapes are malformed, or of a size that the model cannot evaluate.
        """
        ...

    def order(self, members: Sequence[Shape]) -> tuple[int, ...]:
        """The ordering of these members: indices by position of the rotation; the identity without a rotation."""
        ...


class SpeedModelError(UsageError):
    """Groups, shapes or parameters that a speed model cannot evaluate."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The distinct shapes as arrays, one column each, so that NumPy runs along contiguous memory.

    Attributes:
        stage_s: Array (resources, shapes) of seconds per iteration.
        busy_s: Array (shapes,): seconds over all resources.
        iteration_s: Array (shapes,): seconds of an iteration alone.
    """

    stage_s: Floats
    busy_s: Floats
    iteration_s: Floats

    @property
    def resource_count(self) -> int:
        """k, the number of resources."""
        return len(self.stage_s)

    @property
    def share(self) -> Floats:
        """Array (resources, shapes): share of the time alone during which each resource is used, at most 1."""
        return np.minimum(1.0, self.stage_s / self.iteration_s)


def figures_of(shapes: Sequence[Shape], *, max_resources: int | None = None) -> Figures:
    """Check shapes and lay them out as arrays.

    Args:
        shapes: The distinct shapes, at least one.
        max_resources: Most resources that the caller supports.

    Raises:
        ProfileError: A time is negative or not finite, or an iteration takes no time.
        SpeedModelError: There are no shapes or resources, too many resources, or not the same number for all.
    """
    if not shapes:
        raise SpeedModelError("there are no shapes to evaluate; give at least one")
    resources = {len(shape.stage_s) for shape in shapes}
    if len(resources) > 1 or resources == {0}:
        raise SpeedModelError(f"all shapes need the same number of stages, at least 1; these have {sorted(resources)}")
    count = len(shapes[0].stage_s)
    if max_resources is not None and count > max_resources:
        raise SpeedModelError(f"shapes have {count} stages; this model takes at most {max_resources}")
    stage_s = np.array([shape.stage_s for shape in shapes], dtype=np.float64)
    iteration_s = np.array([shape.iteration_s for shape in shapes], dtype=np.float64)
    _refuse_impossible(shapes, stage_s, iteration_s)
    return Figures(np.ascontiguousarray(stage_s.T), stage_s.sum(axis=1), iteration_s)


def _refuse_impossible(shapes: Sequence[Shape], stage_s: Floats, iteration_s: Floats) -> None:
    fine = np.isfinite(stage_s).all(axis=1) & (stage_s >= 0).all(axis=1)
    fine &= np.isfinite(iteration_s) & (iteration_s > 0)
    if fine.all():
        return
    index = int(np.argmin(fine))
    shape = shapes[index]
    where = f"shape {index}" + (f" ({shape.model})" if shape.model else "")
    for stage, value in enumerate(shape.stage_s):
        if not math.isfinite(value) or value < 0:
            raise ProfileError(f"{where}: time of stage {stage} is {value}; it must be ≥ 0 s")
    raise ProfileError(f"{where}: iteration time is {shape.iteration_s}; it must be > 0 s")


def checked_groups(groups: Indices, shape_count: int, max_members: int) -> Indices:
    """Return the array (n, p) of indices of groups.

    Raises:
        SpeedModelError: The array has another form, more than `max_members` members, or an index of no shape.
    """
    array = np.asarray(groups)
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise SpeedModelError(f"groups must be a two-dimensional array of indices, not {array.ndim}-d {array.dtype}")
    if not 1 <= array.shape[1] <= max_members:
        raise SpeedModelError(f"a group has {array.shape[1]} members; it must have 1 to {max_members}")
    if array.size and (array.min() < 0 or array.max() >= shape_count):
        wrong = int(array.min()) if array.min() < 0 else int(array.max())
        raise SpeedModelError(f"groups name shape {wrong}; there are shapes 0 to {shape_count - 1}")
    return array.astype(np.intp, copy=False)


def one_group(members: int) -> Indices:
    """A single group of the first shapes."""
    return np.arange(members, dtype=np.intp)[None]


def chunks(groups: Indices) -> Iterator[tuple[slice, Indices]]:
    """Yield slices of at most CHUNK groups, and these groups with one contiguous row per member."""
    for start in range(0, len(groups), CHUNK):
        part = slice(start, min(start + CHUNK, len(groups)))
        yield part, np.ascontiguousarray(groups[part].T)


def alone(figures: Figures, groups: Indices, *, has_period: bool = True) -> Evaluation:
    """Groups of one: full speed, and an iteration for a period where the model has periods."""
    index = groups[:, 0]
    period = figures.iteration_s[index] if has_period else np.full(len(index), np.nan)
    efficiency = figures.share.mean(axis=0)[index]
    return Evaluation(np.ones((len(index), 1)), efficiency, period)


def used_share(figures: Figures, groups: Indices, speed: Floats) -> Floats:
    """γ where there is no period: Σ_i s_i · u_i^j, averaged over the resources j, at most 1."""
    mean_share = figures.share.mean(axis=0)
    used = np.zeros(len(groups))
    for member in range(groups.shape[1]):
        used += mean_share[groups[:, member]] * speed[:, member]
    return np.minimum(1.0, used)


_CELLS: Final = 4_096  # Most groups of a table: those of 4 out of 8 shapes, and all pairs of 64
_TABLES: Final = 128  # Tables that are kept; each takes at most 200 KiB


def evaluate(model: SpeedModel, shapes: tuple[Shape, ...], groups: Indices) -> Evaluation:
    """Evaluate groups, from a table where there are few shapes; these are sorted, so that they find the same table."""
    count, size = len(shapes), groups.shape[1]
    if count**size > _CELLS:
        return model.evaluate(shapes, groups)
    table = _table(model, shapes, size)
    row = groups[:, 0]
    for place in range(1, size):
        row = row * count + groups[:, place]
    return Evaluation(table.speed[row], table.efficiency[row], table.period_s[row])


@lru_cache(maxsize=_TABLES)
def _table(model: SpeedModel, shapes: tuple[Shape, ...], size: int) -> Evaluation:
    """All groups of a size in every order of their members, so that a look-up gives exactly the model's figures."""
    return model.evaluate(shapes, np.indices((len(shapes),) * size).reshape(size, -1).T)


MAX_MEMBERS: Final = 64  # Progressive filling takes as many steps as there are members; far more than can share a GPU


@dataclass(frozen=True, slots=True)
class Fair:
    """Max-min fair normalized speeds of a work-conserving runtime.

    u_i^j is the share of its time alone during which member i uses resource j. Speeds s_i ≤ 1 are possible when Σ_i s_i
    · u_i^j ≤ 1 for every resource j. All speeds rise together; when a resource is full, its users keep their speed and
    the others rise further. Waiting for a stage in progress is taken to cost nothing: a runtime comes close with short
    stages.
    """

    name: ClassVar = "fair"

    def evaluate(self, shapes: Sequence[Shape], groups: Indices) -> Evaluation:
        """Evaluate many groups of any number of resources; γ is the mean over resources of Σ_i s_i · u_i^j."""
        figures = figures_of(shapes)
        checked = checked_groups(groups, len(shapes), MAX_MEMBERS)
        count, members = checked.shape
        if members == 1:
            return alone(figures, checked, has_period=False)
        share = figures.share
        speed = np.empty((members, count))
        for part, index in chunks(checked):
            speed[:, part] = _filled([share[:, row] for row in index])
        return Evaluation(speed.T, used_share(figures, checked, speed.T), np.full(count, np.nan))

    def order(self, members: Sequence[Shape]) -> tuple[int, ...]:
        """The identity: the member that is furthest behind goes first."""
        return tuple(range(len(members)))


def _filled(share: Sequence[Floats]) -> Floats:
    """Array (members, groups) of max-min fair speeds, from each member's array (resources, groups) of u_i^j."""
    speed = np.zeros((len(share), share[0].shape[1]))
    rising = np.ones_like(speed)  # 1 while a member's speed still rises, then 0
    level = np.zeros(speed.shape[1])
    while rising.any():
        level_of = _full_at(share, speed, rising)
        # Rounding in what is left of a nearly full resource must not lower a level reached before.
        level = np.maximum(level, np.minimum(1.0, level_of.min(axis=0)))
        full = level_of <= level
        for member, uses in enumerate(share):
            np.copyto(speed[member], level, where=rising[member] > 0)
            rising[member, (full & (uses > 0)).any(axis=0) | (level >= 1)] = 0
    return speed


def _full_at(share: Sequence[Floats], speed: Floats, rising: Floats) -> Floats:
    """Array (resources, groups): the common speed at which each resource is full; infinite from 1 on."""
    used = np.zeros_like(share[0])
    wanted = np.zeros_like(share[0])
    for uses, of_member, still in zip(share, speed, rising, strict=True):
        used += uses * (of_member * (1 - still))
        wanted += uses * still
    free = 1 - used
    return np.divide(free, wanted, out=np.full_like(used, np.inf), where=wanted > np.maximum(free, 0))


_UNKNOWN: Final = -1  # Stands for a model that the table doesn't have


def pair_speeds(table: InterferenceTable, number: Mapping[str, int]) -> Floats:
    """Array (models, models): speed of the first with the second, by the models' numbers; NaN where not measured."""
    speed = np.full((len(number), len(number)), np.nan)
    for (model_a, model_b), of_pair in table.pairs.items():
        if model_a in number and model_b in number:
            speed[number[model_a], number[model_b]], speed[number[model_b], number[model_a]] = of_pair
    return speed


@dataclass(frozen=True, slots=True)
class Measured:
    """Speeds from a table of pairs, and from another model where the table has none.

    For three or four members a member's speed is the product of its speeds with each of the others. That takes the
    slow-downs for independent, which overstates them where two partners want the same resource at different times, and
    understates them where memory or caches give way. Missing pairs of a group get their speeds from the other model; so
    does a group without any measured pair as a whole.

    Attributes:
        table: The measured pairs.
        fallback: Model for missing pairs, and for the ordering.
    """

    name: ClassVar = "measured"
    table: InterferenceTable
    fallback: SpeedModel

    def evaluate(self, shapes: Sequence[Shape], groups: Indices) -> Evaluation:
        """Evaluate many groups of up to four members; γ is the mean over resources of Σ_i s_i · u_i^j."""
        figures = figures_of(shapes)
        checked = checked_groups(groups, len(shapes), MAX_GROUP_SIZE)
        if checked.shape[1] == 1:
            return alone(figures, checked, has_period=False)
        speed = self._speeds(shapes, checked)
        return Evaluation(speed, used_share(figures, checked, speed), np.full(len(checked), np.nan))

    def order(self, members: Sequence[Shape]) -> tuple[int, ...]:
        """The other model's: a table of speeds has no ordering."""
        return self.fallback.order(members)

    def _speeds(self, shapes: Sequence[Shape], groups: Indices) -> Floats:
        by_model = PairLookup.of(self.table, shapes)
        pairs = list(combinations(range(groups.shape[1]), 2))
        known = [by_model.known(groups[:, pair]) for pair in pairs]
        any_known = np.logical_or.reduce(known)
        speed = np.ones(groups.shape)
        for pair, measured in zip(pairs, known, strict=True):
            both = groups[:, pair]
            missing = any_known & ~measured
            of_measured, of_missing = by_model.speeds(both[measured]), self._fallback_speeds(shapes, both[missing])
            for column, member in enumerate(pair):
                speed[measured, member] *= of_measured[:, column]
                speed[missing, member] *= of_missing[:, column]
        speed[~any_known] = self._fallback_speeds(shapes, groups[~any_known])
        return speed

    def _fallback_speeds(self, shapes: Sequence[Shape], groups: Indices) -> Floats:
        return self.fallback.evaluate(shapes, groups).speed if len(groups) else np.ones(groups.shape)


@dataclass(frozen=True, slots=True)
class PairLookup:
    """The part of a table that concerns given shapes, as arrays; speeds that were not measured are NaN."""

    model_of: Indices
    speed: Floats

    @staticmethod
    def of(table: InterferenceTable, shapes: Sequence[Shape]) -> "PairLookup":
        """The entries of a table for the models of these shapes."""
        number = {model: index for index, model in enumerate(sorted({shape.model for shape in shapes} & table.models))}
        model_of = np.array([number.get(shape.model, _UNKNOWN) for shape in shapes], dtype=np.intp)
        return PairLookup(model_of, np.pad(pair_speeds(table, number), (0, 1), constant_values=np.nan))

    def known(self, pairs: Indices) -> NDArray[np.bool_]:
        """Which pairs of shapes were measured; the last row and column stand for unknown models."""
        models = self.model_of[pairs]
        return np.isfinite(self.speed[models[:, 0], models[:, 1]])

    def speeds(self, pairs: Indices) -> Floats:
        """Array (n, 2) of the speeds of both."""
        models = self.model_of[pairs]
        return np.stack([self.speed[models[:, 0], models[:, 1]], self.speed[models[:, 1], models[:, 0]]], axis=1)
