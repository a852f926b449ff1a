"""Buckets: jobs that may share GPUs with each other, and what is known of each of them."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from muri.policies.speed.model import Shape, shape_of
from muri.policies.types import PlanJob
from muri.profiler.records import StageProfile

REFERENCE_GPU_S: Final = 3600.0
"""A job with this many GPU-seconds of service left (one GPU-hour) has worth 1."""

_LEAST_REMAINING_S: Final = 1.0
_LEAST_ATTAINED_GPU_S: Final = 60.0
"""Service below which jobs count as equally short: nobody is worth infinitely much."""


class Bucket(NamedTuple):
    """What members of a group must have in common; the user is empty where users may mix."""

    user: str
    partition: str
    gpu_count: int
    node_count: int = 1


class ShapeTable:
    """The distinct shapes of a request's jobs, sorted; equal profiles are looked at once.

    Args:
        jobs: All jobs that may be grouped; they must outlive the table.
    """

    def __init__(self, jobs: Iterable[PlanJob]) -> None:
        profiles = {id(job.profile): job.profile for job in jobs if job.profile is not None}
        shapes = {key: _shape(profile) for key, profile in profiles.items()}
        self.shapes = tuple(sorted({shape for shape in shapes.values() if shape is not None}))
        number = {shape: index for index, shape in enumerate(self.shapes)}
        self._of_profile = {key: None if shape is None else number[shape] for key, shape in shapes.items()}

    def index(self, job: PlanJob) -> int | None:
        """Index of the job's shape; None for a job that cannot share, or of which nothing is known."""
        if not job.groupable or job.profile is None:
            return None
        return self._of_profile[id(job.profile)]


def _shape(profile: StageProfile) -> Shape | None:
    return shape_of(profile) if sum(profile.stage_s) > 0 else None


def worth_of(job: PlanJob) -> float:
    """What a second of a job's full-speed progress is worth: the inverse of its remaining service.

    Weighing speeds so is Smith's rule: it shortens the mean completion time. Where the duration is
    unknown, the service attained so far stands in, as in 2D-LAS.
    """
    if job.remaining_s is not None:
        return REFERENCE_GPU_S / (max(_LEAST_REMAINING_S, job.remaining_s) * job.gpu_count)
    return REFERENCE_GPU_S / max(_LEAST_ATTAINED_GPU_S, job.attained_gpu_s)
