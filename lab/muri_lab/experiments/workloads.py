"""Changes of a trace in the papers: when its jobs are submitted, and which models they train."""

from dataclasses import replace
from random import Random
from typing import Final

from muri.profiler.records import StageProfile
from muri.simulator.model import Trace, TraceJob
from muri.simulator.traces.models import Model, measured_models

BOTTLENECKS: Final = {
    "gpu": ("bert", "gpt2"),
    "network": ("vgg16", "vgg19"),
    "storage": ("resnet18", "shufflenet_v2_x1_0"),
    "cpu": ("a2c", "dqn"),
}
"""Models by bottleneck (Muri, Table 3), in the order in which the paper's Figure 13 adds them."""


def submitted_at_zero(trace: Trace) -> Trace:
    """The trace with all jobs submitted at its start; papers add a prime to its name."""
    jobs = tuple(replace(job, submit_s=0.0) for job in sorted(trace.jobs, key=lambda job: job.job_id))
    return replace(trace, name=f"{trace.name}'", jobs=jobs)


def with_bottlenecks(trace: Trace, kinds: int, seed: int = 0) -> Trace:
    """Return the trace with the models of the first `kinds` bottlenecks only (Muri, Figure 13).

    Jobs that train one of them stay as they are; the others draw one. Service times stay, up to one iteration.
    """
    wanted = {name for models in list(BOTTLENECKS.values())[:kinds] for name in models}
    models = [model for model in measured_models() if model.name in wanted]
    random = Random(seed)
    jobs = [job if job.key.model in wanted else _training(job, random.choice(models)) for job in trace.jobs]
    return replace(trace, jobs=tuple(jobs))


def _training(job: TraceJob, model: Model) -> TraceJob:
    """The job with another model, for as long as before."""
    profile: StageProfile = model.profile(job.gpu_count)
    iterations = max(1, round(job.service_s / profile.iteration_s))
    return replace(job, iterations=iterations, profile=profile, sensitivity=None, batch=None, gpu_utilization=None)
