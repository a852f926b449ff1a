"""How fast a job gets on with another number of GPUs than it asked for. Pure."""

from muri.policies.traits import model_of, relative_goodput
from muri.simulator.model import TraceJob


def elastic_speed(job: TraceJob, gpu_count: int) -> float:
    """Speed on so many GPUs, 1 = on as many as the job asked for.

    Throughput times statistical efficiency: computing scales with the GPUs, synchronizing follows the ring all-reduce.

    Args:
        job: The job, with its true profile.
        gpu_count: GPUs that it holds.

    Source: Pollux (Qiao et al., OSDI 2021), section 3, simplified as `muri.policies.traits` says.
    """
    if gpu_count == job.gpu_count:
        return 1.0
    model = model_of(job.batch, job.profile)
    assert model is not None, "a job of a trace has a profile"
    return relative_goodput(model, job.gpu_count, gpu_count)
