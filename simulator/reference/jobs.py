"""A trace as arrays, in the units and with the rounding of the public simulator."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from muri.policies.speed.model import Floats, Indices, Shape
from muri.profiler.records import StageProfile
from muri.simulator.model import Trace, TraceJob
from muri.simulator.reference.constants import RUN_TIME_FACTOR, restart_overhead_s

Flags = NDArray[np.bool_]

_DIGITS_MS = 6
"""Digits after a millisecond that a trace can have. The simulator computes in milliseconds; seconds that were
divided by 1,000 and multiplied again would differ in the last bit, which decides ties."""


@dataclass(frozen=True, slots=True)
class JobTable:
    """The jobs of a trace by submit time; rows of all arrays are jobs.

    Attributes:
        jobs: The jobs themselves.
        submit_s: Submit time.
        gpus: GPUs of each.
        iterations: Iterations of each.
        iteration_s: Seconds of an iteration alone, with the simulator's factor.
        listed_s: The duration that the trace states, or that of the work where it states none.
        overhead_s: What an event costs the job while it runs.
        opportunistic: AntMan's second class.
        resource_s: Array (n, 3): seconds per iteration of load with preprocess, of propagate and of synchronize.
        kind: Index into `shapes`.
        shapes: The distinct profiles; load holds load and preprocess together.
        planned: What policies take them for: the same, unless profiles are noisy.
    """

    jobs: tuple[TraceJob, ...]
    submit_s: Floats
    gpus: Indices
    iterations: Floats
    iteration_s: Floats
    listed_s: Floats
    overhead_s: Floats
    opportunistic: Flags
    resource_s: Floats
    kind: Indices
    shapes: tuple[Shape, ...]
    planned: tuple[Shape, ...]

    def __len__(self) -> int:
        """How many jobs there are."""
        return len(self.jobs)


def job_table(trace: Trace, noise: float = 0.0, seed: int = 0) -> JobTable:
    """Lay out a trace as arrays.

    Args:
        trace: The jobs.
        noise: n_p: for planning, every stage of every distinct profile gets a factor from U[1 − n_p, 1 + n_p]
            (Muri, section 6.4); a model is profiled once, so all of its jobs share the error.
        seed: For the noise.
    """
    jobs = tuple(sorted(trace.jobs, key=lambda job: job.submit_s))
    shapes = [_shape(job.profile) for job in jobs]
    distinct = tuple(sorted(set(shapes)))
    place = {shape: index for index, shape in enumerate(distinct)}
    resource_s = np.array([(shape.stage_s[0], *shape.stage_s[2:]) for shape in shapes]).reshape(-1, 3)
    iteration_s = np.array([_ms(job.profile.iteration_s) * RUN_TIME_FACTOR / 1000 for job in jobs])
    iterations = np.array([float(job.iterations) for job in jobs])
    listed = [job.listed_duration_s for job in jobs]
    work_s = (iterations * iteration_s).tolist()
    return JobTable(
        jobs=jobs,
        submit_s=np.array([job.submit_s for job in jobs]),
        gpus=np.array([job.gpu_count for job in jobs], dtype=np.intp),
        iterations=iterations,
        iteration_s=iteration_s,
        listed_s=np.array([work if given is None else given for given, work in zip(listed, work_s, strict=True)]),
        overhead_s=np.array([_overhead_s(job) for job in jobs]),
        opportunistic=np.array([job.opportunistic for job in jobs], dtype=np.bool_),
        resource_s=resource_s,
        kind=np.array([place[shape] for shape in shapes], dtype=np.intp),
        shapes=distinct,
        planned=distinct
        if noise <= 0
        else tuple(_noisy(shape, noise, seed, index) for index, shape in enumerate(distinct)),
    )


def _overhead_s(job: TraceJob) -> float:
    return restart_overhead_s(job.key.model, job.gpu_count) if job.restart_s is None else job.restart_s


def _ms(seconds: float) -> float:
    return round(seconds * 1000, _DIGITS_MS)


def _shape(profile: StageProfile) -> Shape:
    """Load and preprocess as one, everything a whole number of nanoseconds."""
    loaded = _ms(profile.load_s + profile.preprocess_s) / 1000
    stages = (loaded, 0.0, _ms(profile.propagate_s) / 1000, _ms(profile.synchronize_s) / 1000)
    return Shape(stages, _ms(profile.iteration_s) / 1000, 0.0, profile.key.model)


def _noisy(shape: Shape, noise: float, seed: int, index: int) -> Shape:
    factors = np.random.default_rng((seed, index)).uniform(1.0 - noise, 1.0 + noise, len(shape.stage_s)).tolist()
    stages = tuple(stage_s * factor for stage_s, factor in zip(shape.stage_s, factors, strict=True))
    stretch = sum(stages) / (sum(shape.stage_s) or 1.0)
    return Shape(stages, shape.iteration_s * stretch, 0.0, shape.model) if stretch > 0 else shape
