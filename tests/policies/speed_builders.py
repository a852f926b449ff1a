"""Shapes for the tests of the speed models, and plain forms of Eq. 3 and 4 to compare them with."""

from itertools import permutations

import numpy as np
from hypothesis import strategies as st

from muri.policies.grouping.problem import Kind
from muri.policies.options import MAX_GROUP_SIZE
from muri.policies.speed import Shape


def shape(*stage_s, iteration_s=None, model=""):
    """A shape whose iteration takes as long as its stages, unless told otherwise."""
    return Shape(tuple(map(float, stage_s)), float(sum(stage_s) if iteration_s is None else iteration_s), 0.0, model)


def shapes(resources=4, shortest=0.0, overlap=(0.5, 2.0)):
    """Shapes of any stage times, with iterations from half as long as their stages to twice as long."""
    return st.builds(
        lambda stage_s, factor: shape(*stage_s, iteration_s=sum(stage_s) * factor + 0.001),
        st.tuples(*[st.floats(shortest, 10)] * resources),
        st.floats(*overlap),
    )


def kinds_with(shapes, worth=(), largest=()):
    """Kinds of jobs with these shapes, worths (1 where left out) and limits on their groups (none where left out)."""
    worths, limits = worth or (1.0,) * len(shapes), largest or (MAX_GROUP_SIZE,) * len(shapes)
    return tuple(Kind(*figures) for figures in zip(shapes, worths, limits, strict=True))


def one_group(size):
    return np.arange(size)[None]


def rotation_period(seats):
    """Seconds of a full turn: seats[q] holds the stages of the job that starts with resource q, or None."""
    resources = len(seats)
    total = 0.0
    for _ in range(resources):
        total += max(member[resource] for resource, member in enumerate(seats) if member is not None)
        # Everybody moves on to the next resource.
        seats = [seats[-1], *seats[:-1]]
    return total


def interleaving_efficiency(stage_s, period):
    """Eq. 4 one resource after the other: γ = 1 − (1/k) Σ_j (T − Σ_i t_i^j) / T; 0 when the period is."""
    if period <= 0:
        return 0.0
    resources = len(stage_s[0])
    busy_s = [sum(member[resource] for member in stage_s) for resource in range(resources)]
    return 1.0 - sum((period - busy) / period for busy in busy_s) / resources


def every_period(members):
    """Periods of all ways of seating members in a rotation, one by one."""
    resources = len(members[0].stage_s)
    stages = [member.stage_s for member in members]
    empty = [None] * (resources - len(stages))
    return [rotation_period([*way, *empty]) for way in permutations(stages)]
