"""Jobs that count as equal: a problem's size is its number of kinds, not of jobs."""

from dataclasses import dataclass

from muri.policies.grouping.problem import BucketProblem
from muri.policies.speed.model import Shape


@dataclass(frozen=True, slots=True)
class Kinds:
    """The jobs of a problem by kind: equal shape and equal worth.

    Attributes:
        shapes: Shape of each kind; kinds are sorted, so the order of jobs decides nothing.
        worth: Worth of each kind.
        jobs: Indices of the jobs of each kind, the most urgent first.
        urgent: How many of them are among the problem's first `slots` jobs, which must not be left out.
    """

    shapes: tuple[Shape, ...]
    worth: tuple[float, ...]
    jobs: tuple[tuple[int, ...], ...]
    urgent: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many jobs there are of each kind."""
        return tuple(len(jobs) for jobs in self.jobs)


def kinds_of(problem: BucketProblem) -> Kinds:
    """Sort the jobs of a problem into kinds."""
    members: dict[tuple[Shape, float], list[int]] = {}
    for index, key in enumerate(zip(problem.shapes, problem.worth, strict=True)):
        members.setdefault(key, []).append(index)
    ordered = sorted(members)
    jobs = tuple(tuple(members[key]) for key in ordered)
    return Kinds(
        shapes=tuple(shape for shape, _ in ordered),
        worth=tuple(worth for _, worth in ordered),
        jobs=jobs,
        urgent=tuple(sum(index < problem.slots for index in indices) for indices in jobs),
    )
