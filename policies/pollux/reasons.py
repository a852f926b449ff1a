"""Why a job got more or fewer GPUs than it asked for, in sentences for people."""

from muri.policies.cycle.reasons import plural
from muri.policies.reason import Reason
from muri.policies.types import PlanJob

RIGID = Reason("it gets the GPUs that it asked for or none: it has no checkpoint or no profile, or must span nodes")


def sized(job: PlanJob, gpu_count: int, speed: float) -> Reason:
    """Why so many GPUs."""
    if gpu_count == job.gpu_count:
        return Reason("{}, as it asked for: any more help other jobs more", (plural(gpu_count, "GPU"),))
    if gpu_count > job.gpu_count:
        return Reason(
            "{} instead of the {} that it asked for help nobody more: predicted goodput {:.2f} times as high",
            (plural(gpu_count, "GPU"), job.gpu_count, speed),
        )
    return Reason(
        "{} instead of the {} that it asked for, since the others help other jobs more: predicted goodput {:.2f} "
        "times that of all",
        (plural(gpu_count, "GPU"), job.gpu_count, speed),
    )


def resized(held: int, gpu_count: int) -> Reason:
    """Why a running job restarts."""
    return Reason(
        "restarted on {} instead of {}: that pays for the restart before the next plan",
        (plural(gpu_count, "GPU"), held),
    )


def no_gpu_left(partition: str, ahead: int) -> Reason:
    """Why a job of any size waits."""
    return Reason(
        "no GPU of partition {} is left for it: {} ahead of it, by service received and submit time",
        (partition, plural(ahead, "waiting job")),
    )
