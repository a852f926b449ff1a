"""The question that grouping answers, and its answer: pure data, no method of solving."""

from dataclasses import dataclass

from muri.policies.speed.model import Shape
from muri.policies.types import Certificate

Members = tuple[int, ...]
"""Indices of a group's members into the problem's jobs, ascending: the most urgent first."""


@dataclass(frozen=True, slots=True)
class BucketProblem:
    """Jobs that may share GPUs with each other, and how many groups of them there is room for.

    Attributes:
        shapes: What sharing depends on, for each job; the most urgent job first.
        worth: What a second of each job's full-speed progress is worth; all 1 unless the objective is "jct".
        gpu_count: GPUs of each job, the same for all.
        slots: How many groups (of any size, single jobs too) can run at once.
        memory_limit_gib: GPU memory that a group may use; infinite when unknown.
    """

    shapes: tuple[Shape, ...]
    worth: tuple[float, ...]
    gpu_count: int
    slots: int
    memory_limit_gib: float = float("inf")


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
